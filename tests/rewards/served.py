"""Rewards for tests of the server, served as `FILE.py:FUNCTION`. Metadata say what shall happen to an image."""

import time

import numpy as np


def mean(images, prompts, metadata):
    time.sleep(max(entry.get("sleep", 0.0) for entry in metadata))
    for entry in metadata:
        if "raise" in entry:
            raise {"value": ValueError, "other": RuntimeError}[entry["raise"]]("as the metadata asked")
    scores = images.mean((1, 2, 3)) / 255.0
    scores = np.where([entry.get("nan", False) for entry in metadata], np.nan, scores)
    return np.where([entry.get("size", False) for entry in metadata], len(images), scores)


def unordered(images, prompts, metadata):
    return np.arange(len(images))


def broken(images, prompts, metadata):
    return np.full(len(images), np.nan)


def short(images, prompts, metadata):
    return np.zeros(1)
