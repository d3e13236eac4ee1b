"""What a recipe needs and costs on a TPU slice or a box of GPUs, found without either: `densegrpo plan`."""
