"""What evaluation needs of a data set: its captions and images, embedded."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass
class Pairs:
  text: np.ndarray  # float32 [Q, D], unit norm
  image: np.ndarray  # float32 [M, D], unit norm
  image_of_text: np.ndarray  # int64 [Q], row of `image` that caption q belongs to
  captions: list[str]  # [Q]
  picture: Callable[[int], bytes]  # encoded (PNG or JPEG) picture of image m
  relevant: Callable | None = None  # int [q] captions -> bool [q, M] true relevance, where known
  image_names: list[str] | None = None  # [M], file names, where the data set has them
  caption_ids: list[str] | None = None  # [Q], as in image.jpg#2
