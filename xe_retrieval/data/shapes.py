"""The embedded data set: drawn scenes, captions of every level of detail, true relevance.

A scene is int8 [3, 4]: up to three objects, each (shape, colour, size, cell), -1 where absent,
sorted by cell. Scene, image and caption are functions of (seed, split, index) alone.
"""

import functools
import itertools
import re
import zlib

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
COLOURS = {
  "red": (222, 60, 54),
  "orange": (245, 146, 36),
  "yellow": (248, 222, 70),
  "green": (70, 172, 84),
  "blue": (64, 112, 226),
  "purple": (142, 78, 190),
  "pink": (244, 150, 190),
  "white": (246, 246, 246),
}
SIZES = ("small", "large")
PLACES = (
  *("at the top left", "at the top", "at the top right"),
  *("on the left", "in the middle", "on the right"),
  *("at the bottom left", "at the bottom", "at the bottom right"),
)
RELATIONS = ("left of", "right of", "above", "below")
COUNTS = ("one shape", "two shapes", "three shapes")
OBJECTS, CELLS, PIXELS = 3, 9, 64
BACKGROUND = (38, 42, 50)

# Scenes are assigned to splits by their hash, so no scene is in two splits.
_SHARE = {"test": range(0, 4), "validation": range(4, 8), "train": range(8, 20)}
# The first draw of the test split was seen while the quickstart's settings were chosen.
_DRAW = {"test": "test, second draw", "validation": "validation", "train": "train"}


@functools.lru_cache(maxsize=1)  # its caption needs it once more
def scene(seed: int, split: str, index: int) -> np.ndarray:
  """Scene number `index` of a split, int8 [3, 4], read-only."""
  draw = _generator(seed, split, index, "scene")
  while True:
    candidate = _draw_scene(draw)
    if zlib.crc32(candidate.tobytes()) % 20 in _SHARE[split]:
      candidate.setflags(write=False)
      return candidate


def caption(seed: int, split: str, index: int) -> str:
  """A true caption of that scene, anywhere between "some shapes" and a list of all objects."""
  draw = _generator(seed, split, index, "caption")
  objects = [o for o in scene(seed, split, index) if o[0] >= 0]
  draw.shuffle(objects)
  level = draw.choice(len(_LEVELS), p=[weight for weight, _ in _LEVELS])
  return _LEVELS[level][1](objects, draw)


def render(scene: np.ndarray) -> np.ndarray:
  """int8 [3, 4] -> uint8 [64, 64, 3]."""
  canvas = np.empty((PIXELS, PIXELS, 3), np.float32)
  canvas[:] = BACKGROUND
  for shape, colour, size, cell in scene[scene[:, 0] >= 0]:
    alpha = _sprite(int(shape), int(size), int(cell))[..., None]  # [64, 64, 1]
    canvas += alpha * (np.asarray(list(COLOURS.values())[colour]) - canvas)
  return canvas.round().astype(np.uint8)


def relevance(captions: list[str], scenes: np.ndarray) -> np.ndarray:
  """Whether each caption is true of each scene; [Q], int8 [M, 3, 4] -> bool [Q, M]."""
  verdict = {text: _true_of(text, scenes) for text in set(captions)}
  return np.stack([verdict[text] for text in captions]) if captions else np.zeros((0, len(scenes)))


def _generator(seed, split, index, purpose):
  return np.random.default_rng([seed, zlib.crc32(f"{_DRAW[split]}/{purpose}".encode()), index])


def _draw_scene(draw):
  count = (1, 2, 2, 2, 3, 3, 3, 3, 3, 3)[draw.integers(10)]
  out = np.full((OBJECTS, 4), -1, np.int8)
  out[:count, :3] = draw.integers((len(SHAPES), len(COLOURS), len(SIZES)), size=(OBJECTS, 3))[
    :count
  ]
  out[:count, 3] = np.sort(draw.permutation(CELLS)[:count])
  return out


@functools.cache
def _sprite(shape, size, cell):
  """Coverage of one object on the canvas, float32 [64, 64], drawn at 4x and averaged."""
  fine, radius = 4, (5.2, 9.6)[size]
  row, column = divmod(cell, 3)
  y, x = (np.array([row, column]) + 0.5) * PIXELS / 3

  def corners(angles, radii):
    turn = np.deg2rad(angles)
    points = np.stack([x + np.sin(turn) * radii, y - np.cos(turn) * radii], -1)
    return [tuple(p) for p in points * fine]

  image = Image.new("L", (PIXELS * fine, PIXELS * fine))
  draw = ImageDraw.Draw(image)
  match SHAPES[shape]:
    case "circle":
      edge = radius * 0.95
      draw.ellipse(
        [(x - edge) * fine, (y - edge) * fine, (x + edge) * fine, (y + edge) * fine], 255
      )
    case "square":
      draw.polygon(corners(np.arange(45, 405, 90), radius * 1.2), 255)
    case "triangle":
      draw.polygon(corners(np.arange(0, 360, 120), radius * 1.15), 255)
    case "diamond":
      draw.polygon(corners(np.arange(0, 360, 90), radius * np.array([1.15, 0.7] * 2)), 255)
    case "star":
      draw.polygon(corners(np.arange(0, 360, 36), radius * np.array([1.15, 0.45] * 5)), 255)
    case "cross":
      arm = radius * 0.36
      for a, b in ((radius, arm), (arm, radius)):
        draw.rectangle([(x - a) * fine, (y - b) * fine, (x + a) * fine, (y + b) * fine], 255)
  blocks = np.asarray(image, np.float32).reshape(PIXELS, fine, PIXELS, fine) / 255
  return blocks.mean((1, 3))


# ---- captions: words for objects ----


def _phrase(o, size=True, colour=True, shape=True):
  words = [SIZES[o[2]]] if size else []
  words += [list(COLOURS)[o[1]]] if colour else []
  words += [SHAPES[o[0]] if shape else "shape"]
  return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def _one_property(objects, draw):
  kept = draw.integers(3)
  return _phrase(objects[0], size=kept == 0, colour=kept == 1, shape=kept == 2)


def _related(objects, draw):
  if len(objects) == 1:
    return f"{_phrase(objects[0])} {PLACES[objects[0][3]]}"
  a, b = objects[:2]
  holds = [r for r in range(4) if _RELATES[r](a[3], b[3])]
  return f"{_phrase(a)} {RELATIONS[draw.choice(holds)]} {_phrase(b)}"


def _all_objects(objects, draw):
  names = [_phrase(o) for o in objects]
  return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


_RELATES = (
  lambda a, b: a % 3 < b % 3,
  lambda a, b: a % 3 > b % 3,
  lambda a, b: a // 3 < b // 3,
  lambda a, b: a // 3 > b // 3,
)

# (share of captions, how to phrase them), from vague to complete
_LEVELS = (
  (0.10, lambda objects, draw: "some shapes"),
  (0.10, lambda objects, draw: COUNTS[len(objects) - 1]),
  (0.20, _one_property),
  (0.20, lambda objects, draw: _phrase(objects[0], size=False)),
  (0.10, lambda objects, draw: f"{_phrase(objects[0])} {PLACES[objects[0][3]]}"),
  (0.10, _related),
  (0.20, _all_objects),
)

# ---- relevance: captions parsed ----

_NOUN = re.compile(
  rf"an? (?:({'|'.join(SIZES)}) ?)?(?:({'|'.join(COLOURS)}) ?)?({'|'.join(SHAPES)}|shape)"
)


def _true_of(text, scenes):
  """bool [M]; parses every sentence that `caption` can produce."""
  present = scenes[..., 0] >= 0  # [M, 3]
  if text == "some shapes":
    return present.any(1)
  if text in COUNTS:
    return present.sum(1) == COUNTS.index(text) + 1
  nouns = list(_NOUN.finditer(text))
  rest = _NOUN.sub("#", text)
  matches = [_matches(noun, scenes) for noun in nouns]  # each [M, 3]
  if rest == "#":
    return matches[0].any(1)
  if rest[2:] in PLACES:
    return (matches[0] & (scenes[..., 3] == PLACES.index(rest[2:]))).any(1)
  if rest[2:-2] in RELATIONS:
    holds = _RELATES[RELATIONS.index(rest[2:-2])]
    return _some_assignment(matches, lambda a, b: holds(scenes[:, a, 3], scenes[:, b, 3]))
  if rest in ("# and #", "#, # and #"):
    return _some_assignment(matches, lambda *_: True)
  raise ValueError(f"not a caption of the shapes data set: {text!r}")


def _matches(noun, scenes):
  size, colour, shape = noun.groups()
  fits = scenes[..., 0] >= 0
  if size:
    fits &= scenes[..., 2] == SIZES.index(size)
  if colour:
    fits &= scenes[..., 1] == list(COLOURS).index(colour)
  if shape != "shape":
    fits &= scenes[..., 0] == SHAPES.index(shape)
  return fits


def _some_assignment(matches, holds):
  """True where the nouns match distinct objects for which `holds` is true."""
  found = np.zeros(len(matches[0]), bool)
  for chosen in itertools.permutations(range(OBJECTS), len(matches)):
    fits = np.logical_and.reduce([m[:, o] for m, o in zip(matches, chosen, strict=True)])
    found |= fits & holds(*chosen)
  return found
