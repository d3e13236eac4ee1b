"""Experiments, one a file; each defines get_config(). Installed as densegrpo_jax_configs."""
