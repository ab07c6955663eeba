"""Real photographs on a laptop: Flickr8k, both pretrained towers frozen, the projections learn.

  python -m xe_retrieval.prepare --captions=captions.tsv --images=photos --name=flickr8k
  python -m xe_retrieval.main --config=configs/flickr8k.py:cross_example_softmax --workdir=runs/f8k

The towers are run once; their features are cached under data.dir for all later runs. Weights may
also be local directories (--config.text.pretrained=…, --config.image.pretrained=…).
"""

from configs import cc


def get_config(loss: str = "cross_example_softmax"):
  config = cc.get_config(loss)
  config.steps = 1_000
  config.data.name = "captions/flickr8k"
  config.data.dir = "datasets"
  config.data.augment = "none"  # else the image tower's features could not be cached

  text = config.text
  text.pretrained = "sentence-transformers/all-MiniLM-L6-v2"
  text.pooling = "mean"  # as it was trained
  text.freeze = "all"
  text.learning_rate = 1e-3
  text.warmup_steps = 50

  image = config.image
  image.pretrained = "microsoft/resnet-50"
  image.freeze = "all"
  image.size = 160
  image.optimizer = "adamw"
  image.learning_rate, image.end_learning_rate = 1e-3, 0.0
  image.warmup_steps = 50

  config.eval_every = 250
  config.checkpoint_every = 250
  return config
