"""The paper's recipe at a large batch: --config=configs/cc_large.py:LOSS,BATCH.

The rule, for a batch of k × 512: learning rates × √k, steps and warm-up ÷ √k, so that the sum of
the learning rates over the run stays the paper's. At 32,768 pairs k is 64: 8 times the rates, 3,125
steps, 31 epochs of 3.3 million images (25,000 steps would be 247). At least 100 steps of warm-up
for both towers, and gradients are clipped. The rule was not tried at these sizes.
"""

import math

from configs import cc

PAPER = 512  # pairs
WARMUP = 100  # steps


def get_config(argument: str = "cross_example_negative_mining,32768"):
  loss, _, batch = argument.partition(",")
  config = cc.get_config(loss)
  config.batch_size = int(batch or 32_768)
  factor = math.sqrt(config.batch_size / PAPER)
  config.steps = round(config.steps / factor)
  for tower in (config.text, config.image):
    tower.learning_rate *= factor
    tower.end_learning_rate *= factor
    tower.warmup_steps = max(round(tower.warmup_steps / factor), WARMUP)
  config.clip_norm = 1.0
  config.loss_implementation = "streaming"
  config.dtype = "bfloat16"
  config.eval_every = config.checkpoint_every = max(round(1_000 / factor), 1)
  return config
