"""The letters of the tiny world: an atlas of 26 capitals, each 12 pixels tall and 7 wide, shipped as `glyphs.npz`.

`python -m densegrpo_jax.scenes.glyphs` draws it anew from DejaVu Sans Mono Bold (a free font that comes with matplotlib).
"""

from functools import cache
from pathlib import Path

import numpy as np

ATLAS = Path(__file__).parent / "glyphs.npz"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HEIGHT, WIDTH = 12, 7  # pixels of one letter


@cache
def load_atlas() -> np.ndarray:
    """Returns the shipped letters as ink coverage in [0, 1], float32 [26, 12, 7], in alphabetical order."""
    with np.load(ATLAS, allow_pickle=False) as file:
        return file["coverage"].astype(np.float32) / 255.0


def render_atlas() -> np.ndarray:
    """Returns the letters drawn from the font: each cropped to its ink and area-averaged to one size, uint8 [26, 12, 7]."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono-Bold.ttf", size=160)
    letters = []
    for letter in LETTERS:
        left, top, right, bottom = font.getbbox(letter)
        image = Image.new("L", (right - left, bottom - top))
        ImageDraw.Draw(image).text((-left, -top), letter, fill=255, font=font)
        letters.append(np.asarray(image.resize((WIDTH, HEIGHT), Image.Resampling.BOX)))
    return np.stack(letters)


if __name__ == "__main__":
    np.savez_compressed(ATLAS, coverage=render_atlas())
