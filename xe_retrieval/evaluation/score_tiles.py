"""The score matrix of queries × documents, one tile at a time, never as a whole."""

import numpy as np
import tqdm

QUERIES, DOCUMENTS = 512, 8192  # a tile of scores: 16 MiB


def embeddings(name, x, width=None):
  """Checks that `x` is a finite float [N, D]; returns it as float32, uncopied if it is that."""
  x = np.asarray(x)
  if x.ndim != 2 or not np.issubdtype(x.dtype, np.floating):
    raise ValueError(f"{name} must be float [N, D], not {x.dtype} {list(x.shape)}")
  if width is not None and x.shape[1] != width:
    raise ValueError(f"{name} has width {x.shape[1]}, but the others have {width}")
  x = np.asarray(x, np.float32)
  # A row sum is finite only if the row is: no [N, D] mask for millions of rows.
  bad = np.flatnonzero(~np.isfinite(x.sum(axis=1)))
  if bad.size:
    raise ValueError(f"{name} holds NaN or infinity in {bad.size} rows, the first is {bad[0]}")
  return x


def pairing(text, image, image_of_text):
  """Checks the three against each other; returns them as float32, float32, int64."""
  text = embeddings("text", text)
  image = embeddings("image", image, text.shape[1])
  image_of_text = np.asarray(image_of_text)
  if image_of_text.shape != (len(text),) or not np.issubdtype(image_of_text.dtype, np.integer):
    raise ValueError(
      f"image_of_text must be int [{len(text)}], one image row per caption, "
      f"not {image_of_text.dtype} {list(image_of_text.shape)}"
    )
  if not len(text):
    raise ValueError("there are no captions to evaluate")
  if image_of_text.min() < 0 or image_of_text.max() >= len(image):
    raise ValueError(f"image_of_text must lie in [0, {len(image)})")
  return text, image, image_of_text.astype(np.int64)


def parts(image, distractors=None):
  """The arrays whose rows, one after the other, are the documents."""
  if distractors is None:
    return [image]
  if not isinstance(distractors, (list, tuple)):
    distractors = [distractors]
  return [image] + [embeddings("distractors", d, image.shape[1]) for d in distractors]


def stream(parts, size):
  """Documents in parts -> (number of the first, [n, D]) tiles of nearly equal size."""
  start = 0
  for part in parts:
    for rows in spans(len(part), size):
      yield start + rows.start, part[rows]
    start += len(part)


def product(queries, documents):
  """[q, D], [n, D] -> float32 [q, n].

  BLAS has several routines, which round differently: the same two rows can have another last bit
  at another place of a tile or in a tile of another size.
  """
  return np.matmul(queries, documents.T)


def spans(total, size):
  """Slices of nearly equal length, at most `size`, that cover range(total)."""
  count = -(-total // size)
  edges = [total * i // count for i in range(count + 1)]
  return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def progress(steps, what, total=None):
  """A bar, once the work has taken two seconds."""
  return tqdm.tqdm(steps, desc=what, total=total, delay=2, mininterval=0.5, leave=False)
