"""TensorFlow for TensorBoard, ScaNN and Google's checkpoints: on the host, never on an accelerator.

Import it where it is needed: it takes seven seconds of CPU and 0.4 GB.
"""

import os

# Silences the report that there is no GPU. (Not setdefault: importing jax has set it to 1.)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

for kind in ("GPU", "TPU"):
  tf.config.set_visible_devices([], kind)
