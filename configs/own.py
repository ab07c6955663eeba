"""Your own images and captions: looks at how many there are, and trains in minutes.

  python -m xe_retrieval.prepare --captions=captions.tsv --images=photos/ --out=datasets --name=mine
  python -m xe_retrieval.main --config=configs/own.py:datasets/captions/mine --workdir=runs/mine

After the colon: the directory of the data set that `prepare` made; a comma and a loss may follow.
Towers, loss and score are those of configs/flickr8k.py: both towers are frozen and run once over
the data, so that training itself takes seconds to a few minutes, for 200 images or 200,000.
"""

import json
import pathlib

from configs import flickr8k

BATCH = 1_024  # pairs, where there are so many
EPOCHS = 240  # of few images; each is shown with one of its captions an epoch
STEPS = 1_200  # for IMAGES of them, as configs/flickr8k.py; 2,000 for COCO's 37,000
IMAGES = 5_000


def get_config(argument: str = "datasets/captions/mine,corrected_cross_example_softmax"):
  directory, _, loss = argument.partition(",")
  config = flickr8k.get_config(loss or "corrected_cross_example_softmax")
  images = look(config, directory)
  config.steps = round(
    min(EPOCHS * images / config.batch_size, STEPS * max(images / IMAGES, 1) ** 0.25)
  )
  for tower in (config.text, config.image):
    tower.learning_rate *= (config.batch_size / BATCH) ** 0.5
    tower.warmup_steps = min(50, config.steps // 6)
  # Few images are learned by heart early: the best of four checkpoints on validation is used.
  config.eval_every = config.checkpoint_every = -(-config.steps // 4)
  return config


def look(config, directory) -> int:
  """Takes the data set of a directory, and a batch that it can fill; how many images it has."""
  path = pathlib.Path(directory).expanduser()
  images = _training_images(path)
  named = path.parent.name == "captions"
  config.data.name = f"captions/{path.name}" if named else str(path)
  config.data.dir = str(path.parent.parent if named else path.parent)
  config.batch_size = min(BATCH, 1 << (images.bit_length() - 1))  # a power of two that is there
  return images


def _training_images(path):
  """How many there are, by the file that every data set has; before any library is loaded."""
  found = sorted(path.glob("*/dataset_info.json"))
  if not found:
    raise ValueError(
      f"{path} of --config holds no data set; this makes one: python -m "
      f"xe_retrieval.prepare --captions=TABLE --images=DIR --out=datasets --name={path.name}"
    )
  for split in json.loads(found[-1].read_text())["splits"]:
    if split["name"] == "train" and (count := sum(map(int, split["shardLengths"]))):
      return count
  raise ValueError(f"{found[-1].parent} has no images in its split 'train'")
