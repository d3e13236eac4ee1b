"""Packaging. `pip install -e .` brings what training needs; everything else is an extra."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1] for line in (HERE / "densegrpo_jax/__init__.py").read_text().splitlines() if line.startswith("__version__")
)

TORCH_PARITY = 'python_version < "3.12"'  # the parity suite is skipped, by name, where torch is absent

COMPILES_FOR_TPU = f'{TORCH_PARITY} and sys_platform == "linux" and platform_machine == "x86_64"'  # tests skipped, by name, without it

OCR = ["rapidocr>=3.10", "onnxruntime>=1.20"]

EXTRAS = {
    "tpu": ["jax[tpu]"],
    "cuda12": ["jax[cuda12]"],
    "cuda13": ["jax[cuda13]"],
    "ocr": OCR,
    "wandb": ["wandb"],
    "datasets": ["datasets>=3"],
    "server": ["torch>=2.4"],  # detectors of the GenEval reward server; training never imports it
    "test": [
        *OCR,
        "pytest>=8",
        "pytest-xdist>=3",
        "pytest-timeout>=2",
        "hypothesis>=6.100",
        "ruff>=0.6",
        "diffusers>=0.42",
        f"torch==2.13.0; {TORCH_PARITY}",
        f"peft>=0.17; {TORCH_PARITY}",
        f"jax[tpu]; {COMPILES_FOR_TPU}",
    ],
}

setup(
    name="densegrpo_jax",
    version=VERSION,
    description="Align flow-matching text-to-image models with dense step-wise rewards (DenseGRPO), in JAX and Flax",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["densegrpo_jax", "densegrpo_jax.*"]), "densegrpo_jax_configs"],
    package_dir={"densegrpo_jax_configs": "configs"},
    package_data={
        "densegrpo_jax": ["**/*.safetensors", "**/*.json", "**/*.txt", "**/*.html", "**/*.npz", "**/*.jsonl"],
        "densegrpo_jax_configs": ["psi/*.json"],
    },
    install_requires=[
        "jax>=0.10.2",
        "flax>=0.12.8",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "numpy>=2.0",
        "scipy>=1.13",
        "safetensors>=0.8",
        "huggingface_hub>=1.0",
        "transformers>=5.0",
        "pillow>=10",
        "tyro>=0.9",
        "tqdm>=4.66",
        "matplotlib>=3.8",
        "tensorboardX>=2.6",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["densegrpo = densegrpo_jax.cli:main"]},
)
