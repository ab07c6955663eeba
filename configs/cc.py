"""The paper's recipe: BERT-base and ResNet-50 on Conceptual Captions. The one full config.

  python -m xe_retrieval.main --config=configs/cc.py:cross_example_negative_mining --workdir=runs/cc

The argument after the colon is the loss; `xe_retrieval.losses.names()` lists them. Every field can
be overridden on the command line (--config.batch_size=64). Other configs import this and edit it.
"""

from ml_collections import ConfigDict


def get_config(loss: str = "cross_example_softmax") -> ConfigDict:
  config = ConfigDict()
  config.seed = 0
  config.steps = 25_000
  config.batch_size = 512  # global: over all devices and processes

  # ---- loss ----
  config.loss = loss
  # Logits are scale × cosine. The paper also writes ⟨λx̂, λŷ⟩, which is scale = 400; there, mining
  # the top half of the negatives is a numerical no-op.
  config.scale = 20.0
  config.scale_learned = False  # start at config.scale and learn it, at most 100, as CLIP does
  config.keep = 0.5  # share of negatives that the mining losses keep, in (0, 1]
  # corrected_…: share of a query's and an image's own level that is subtracted from its scores
  config.correction = 0.5
  config.corrected_share = 1.0  # corrected_…: the rest of the loss is that of the plain scores
  config.bias_learned = False  # sigmoid: start at −log(batch_size) and learn it; False: −10
  # L-Softmax and A-Softmax: the weight of the plain cosine beside that with a margin falls as
  # 1 / (1 + a·step) from margin_start to margin_floor within this share of the steps.
  config.margin_start = 1_000.0
  config.margin_floor = 5.0
  config.margin_annealing = 0.1
  config.tcm_weight = 1.0  # tcm: of the threshold-consistent margin beside sampled softmax
  config.tcm_positive = 0.9  # positives with a lower cosine are raised
  config.tcm_negative = 0.5  # negatives with a higher cosine are lowered
  # Negatives of a row: ids, the rows that share neither image nor caption with it; diagonal, all
  # other rows, as in the paper.
  config.mask = "ids"
  # dense holds the score matrix; streaming gives the same numbers in memory linear in the batch,
  # for batches in the thousands.
  config.loss_implementation = "dense"
  config.embedding_dim = 128

  # ---- data ----
  config.data = ConfigDict()
  config.data.name = "conceptual_captions"  # or shapes/<pairs>
  config.data.dir = ""  # directory of data sets; empty: ~/tensorflow_datasets
  # Processes that decode images for this one; batches are the same for any number. 0: threads of
  # this process; -1: threads on up to 8 cores, on more a process for every core but two. Where
  # several processes train on one machine and each sees all its cores, give the number.
  config.data.workers = -1
  config.data.augment = "random_resized_crop"  # or none; never a flip: "left" must stay left
  config.data.views = 1  # 2: cached features of mirrored photos, too; not where a caption says left

  # ---- what a score means ----
  # Scores are cosines, less what is usual of a caption and of an image against a bank of training
  # images and captions: s − query·a(x) − image·b(y), and lower for queries unlike the training
  # captions (towers/bank.py). All 0: plain cosines, as in the paper.
  config.bank = ConfigDict()
  config.bank.query = 0.0
  config.bank.image = 0.0
  config.bank.familiarity = 0.0
  config.bank.scale = 0.0  # of the mean over the bank, log mean exp(scale·s) / scale; 0: the loss's
  config.bank.size = 4_096  # captions, and images
  config.calibration_split = "validation"  # evaluation fits probabilities on it, judges on others
  # Sentence encoder (directory or Hugging Face id) that says which captions mean the same, so that
  # other images than a caption's own count as relevant; "": only the pairing counts.
  config.caption_encoder = ""

  # ---- a whole CLIP or SigLIP ----
  # Directory or Hugging Face id: both towers, their projections, the size of the common space and,
  # where config.scale is 0, its scale. "": the towers below.
  config.pretrained = ""

  # ---- text tower: BERT ----
  config.text = text = ConfigDict()
  text.family = "bert"  # or distilbert, mpnet, roberta, clip, siglip; a pretrained tower brings it
  # Directory or Hugging Face id; "": from scratch; "A,B": frozen towers side by side.
  text.pretrained = "google-bert/bert-base-uncased"
  text.revision = ""  # commit, tag or branch of a Hugging Face id; "": the newest
  text.freeze = "none"  # none | all (the projection still learns) | number of first blocks
  text.tokens = 32  # captions are truncated and padded to this; 0: to what a pretrained tower knows
  text.pooling = "cls"  # or mean
  text.dropout = 0.1
  text.feature_dropout = 0.0  # of the tower's features, before the projection
  text.trunk = 0  # width of one residual layer before the projection; 0: the paper's plain one
  # The architecture; a pretrained tower brings its own.
  text.vocab_size = 30_522
  text.layers = 12
  text.width = 768
  text.heads = 12
  text.mlp = 3_072
  text.optimizer = "adamw"
  text.learning_rate = 1e-4
  text.end_learning_rate = 0.0  # reached linearly at the last step
  text.warmup_steps = 1_500
  text.weight_decay = 0.01  # of kernels; not in the paper, BERT's own

  # ---- image tower: ResNet ----
  config.image = image = ConfigDict()
  image.family = "resnet"  # or vit, dinov2, clip, siglip; a pretrained tower brings it
  image.pretrained = "microsoft/resnet-50"
  image.revision = ""  # with several towers one of each, in the same order
  image.freeze = "none"
  image.size = 224
  image.trunk = 0
  image.feature_dropout = 0.0
  image.batch_norm = "sync"  # statistics of the global batch; or frozen: running statistics
  image.depths = (3, 4, 6, 3)
  image.widths = (256, 512, 1_024, 2_048)
  image.block = "bottleneck"  # or basic
  image.stem = "imagenet"  # 7x7/2 and pooling; patch: 8x8/8, for small images
  image.stem_width = 64
  image.downsample_in_bottleneck = False  # v1.5
  image.mean = (0.485, 0.456, 0.406)
  image.std = (0.229, 0.224, 0.225)
  # Of families other than resnet.
  image.patch = 16  # pixels
  image.blocks, image.width, image.heads, image.mlp = 12, 768, 12, 3_072
  image.pooling = ""  # cls | mean | cls_mean (both, side by side) | attention; "": the family's
  # e.g. (9, 10): features of these layers, side by side; (): of the last. With several towers one
  # for each: ((), (9, 10)).
  image.layers = ()
  # The middle square, resized (crop); CLIP's and SigLIP's ways come with their weights.
  image.resize = "crop"
  image.optimizer = "sgd"
  image.learning_rate = 3e-3
  image.end_learning_rate = 5e-4
  image.warmup_steps = 0
  image.weight_decay = 0.0

  # ---- numerics ----
  config.dtype = "float32"  # or bfloat16: compute only; parameters, norms and loss stay float32
  config.remat = False  # recompute activations in the backward pass to save memory
  # Rows (over all devices) whose activations are in memory at once, while the loss sees the whole
  # batch; costs one more forward pass. 0: the whole batch. Gradients are the same, except that
  # BatchNorm with batch_norm="sync" normalises by the statistics of a micro-batch.
  config.micro_batch = 0
  config.clip_norm = 0.0  # global gradient norm at which to clip; 0: never
  # Evaluation uses exponential moving averages of parameters and BatchNorm statistics, e.g. 0.999;
  # 0: off
  config.ema_decay = 0.0

  # ---- devices ----
  config.mesh = ConfigDict()
  # False: parameters and optimiser state are replicated. True: they are sharded over the devices
  # and gathered when needed (FSDP).
  config.mesh.shard_parameters = False

  # ---- cadence, in steps ----
  config.log_every = 50
  config.eval_every = 1_000  # validation metrics
  config.checkpoint_every = 1_000
  config.keep_checkpoints = 3  # the latest; the best on validation is kept as well
  config.keep_every = 0  # also those whose step is a multiple of this; 0: none

  # ---- logging, beside the terminal, metrics.jsonl and TensorBoard ----
  config.wandb = ""  # project of Weights & Biases (pip install wandb); "": off
  config.profile_steps = ""  # e.g. 10:15: profile for TensorBoard in workdir/profile; "": off
  return config
