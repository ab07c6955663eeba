"""Real photographs on a laptop: Flickr8k, both pretrained towers frozen, projections trained.

  launch/table.sh    # prepares the data; all losses × five seeds, and the table
  python -m xe_retrieval.main --config=configs/flickr8k.py --workdir=runs/f8k

Without an argument, the recommended setting: a loss on corrected scores, by which retrieval ranks
as well. With a loss after the colon, that loss under the same recipe; evaluation shows its scores
corrected and as plain cosines.

The towers are run once; their features are cached under data.dir for all later runs. Weights are
directories (--config.text.pretrained=…, --config.image.pretrained=…) or Hugging Face ids. All
settings were chosen on the validation split (docs/results.md tells what else was tried).
"""

import os

from configs import cc

# Losses that do not make queries comparable gain from taking off more of a query's own level.
_QUERY_SCOPE = ("sampled_softmax", "snm", "l_softmax", "a_softmax", "triplet", "tcm")
WEIGHTS = "../shared/weights"  # if present; else downloaded from Hugging Face


def get_config(loss: str = "corrected_cross_example_softmax"):
  config = cc.get_config(loss)
  config.steps = 1_200
  config.batch_size = 1_024  # more negatives than the paper's 512 raise PR-AUC
  config.scale = 20.0 if loss.startswith("corrected") else 26.0
  config.loss_implementation = "streaming"  # dense mining sorts a million scores a step
  config.data.name = "captions/flickr8k"
  config.data.dir = "datasets"
  config.data.augment = "none"  # else the image tower's features could not be cached
  config.data.views = 2
  # Projections of frozen features are pulled together or apart by the authors' λ of 5.
  config.margin_floor = 100.0

  config.bank.query = 0.75 if loss in _QUERY_SCOPE else 0.6
  config.bank.image = 0.5
  config.caption_encoder = _weights("minilm-l6", "sentence-transformers/all-MiniLM-L6-v2")

  text = config.text
  text.pretrained = _weights("minilm-l6", "sentence-transformers/all-MiniLM-L6-v2")
  text.pooling = "mean"  # as it was trained
  text.freeze = "all"
  text.feature_dropout = 0.3
  text.learning_rate = 4e-3
  text.warmup_steps = 50

  image = config.image
  image.pretrained = _weights("resnet50-imagenet", "microsoft/resnet-50")
  image.freeze = "all"
  image.feature_dropout = 0.7
  image.size = 224  # as ResNet-50 was trained, though the photos have 160 pixels
  image.optimizer = "adamw"
  image.learning_rate, image.end_learning_rate = 4e-3, 0.0
  image.weight_decay = 0.01
  image.warmup_steps = 50

  config.log_every = 100
  # Only at the end: a run takes less than a minute, a checkpoint (with the frozen towers) 190 MB.
  config.eval_every = config.checkpoint_every = config.steps
  config.keep_checkpoints = 1
  return config


def _weights(directory, hugging_face):
  path = os.path.join(WEIGHTS, directory)
  return path if os.path.isdir(path) else hugging_face
