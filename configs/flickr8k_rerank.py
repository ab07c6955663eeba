"""A re-ranker for a trained dual encoder: reads the caption and each candidate together.

  python -m xe_retrieval.main --config=configs/flickr8k.py --workdir=runs/f8k
  python -m xe_retrieval.main --config=configs/flickr8k_rerank.py --workdir=runs/f8k_rerank \
    --config.first_stage=runs/f8k
  python -m xe_retrieval.evaluate --workdir=runs/f8k --rerank=runs/f8k_rerank --candidates=128

The first stage brings data, towers and its scale; its towers stay as they are, and what they know
of every token is cached under data.dir. After the colon, the loss: cross_example_softmax (every
positive above the hard negatives of all captions of the batch), sampled_softmax (of its own list)
or binary_cross_entropy. The one full config of a re-ranker; others import and edit it.
"""

from ml_collections import ConfigDict


def get_config(loss: str = "cross_example_softmax") -> ConfigDict:
  config = ConfigDict()
  config.first_stage = ""  # workdir of a trained dual encoder
  config.seed = 0
  config.steps = 2_000
  config.batch_size = 64  # captions: over all devices and processes

  # ---- candidate lists ----
  config.mined = 50  # images that the first stage ranks highest for a training caption, mined once
  config.hard = 3  # of these in a caption's list, drawn anew every epoch
  # Images in a list: the own one, the hard ones, and those of the batch's images, (1 + hard) ·
  # batch_size, that the first stage scores highest for this caption.
  config.candidates = 8

  # ---- loss ----
  config.loss = loss
  # The score that is trained: first_weight · scale · (first stage's score) + logit. 1: training
  # starts at the first stage's ranking. 0: the logit alone; evaluation adds both all the same.
  config.first_weight = 1.0

  # ---- the joint encoder ----
  config.joint = joint = ConfigDict()
  joint.streams = "joint"  # one stream of both; or two with co-attention, as ViLBERT
  joint.layers = 2
  joint.width, joint.heads, joint.mlp = 256, 4, 512
  # Tokens that learned queries make of an image, so that they can be stored: 2 · compressed · width
  # bytes. 0: one for each place of the tower's grid.
  joint.compressed = 16
  joint.first_input = False  # the head also sees the first stage's score
  joint.dropout = 0.1
  joint.input_dropout = 0.1  # of the towers' tokens, after their projection
  joint.optimizer = "adamw"
  joint.learning_rate = 3e-4
  joint.end_learning_rate = 0.0  # reached linearly at the last step
  joint.warmup_steps = 100
  joint.weight_decay = 0.01  # of kernels

  # ---- validation, in training ----
  config.validation_captions = 1_000  # evenly spread over the split
  config.validation_candidates = 32

  # ---- numerics and devices, as in configs/cc.py ----
  config.dtype = "float32"
  config.remat = False
  config.clip_norm = 1.0
  config.ema_decay = 0.0
  config.mesh = ConfigDict()
  config.mesh.shard_parameters = False

  # ---- cadence in steps, and logging ----
  config.log_every = 50
  config.eval_every = config.checkpoint_every = 500
  config.keep_checkpoints = 1
  config.keep_every = 0
  config.wandb = ""
  config.profile_steps = ""
  return config
