"""DenseGRPO (arXiv 2601.20218) in JAX and Flax: step-wise dense rewards for flow-matching text-to-image models."""

__version__ = "0.1.0"
