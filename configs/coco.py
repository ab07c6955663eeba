"""COCO photographs on a laptop: as configs/flickr8k.py, with seven times the photos.

  launch/table.sh configs/coco.py    # prepares the data; all losses × three seeds, and the table
  python -m xe_retrieval.main --config=configs/coco.py --workdir=runs/coco

captions/coco is made by `prepare --coco=…` or from a table (docs/data.md).
"""

from configs import flickr8k


def get_config(loss: str = "corrected_cross_example_softmax"):
  config = flickr8k.get_config(loss)
  config.data.name = "captions/coco"
  config.data.views = 1  # the features of 37,000 photos take a quarter of an hour once, not twice
  config.steps = config.eval_every = config.checkpoint_every = 2_000
  return config
