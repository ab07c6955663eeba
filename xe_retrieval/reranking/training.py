"""Training a re-ranker: the first stage's towers stay as they are, a joint encoder learns."""

import jax
import numpy as np

from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.data import paths, pipeline
from xe_retrieval.reranking import batches, lists, measures, settings, step
from xe_retrieval.reranking.first_stage import FirstStage
from xe_retrieval.reranking.scorer import Scorer
from xe_retrieval.training import loop, processes
from xe_retrieval.training.checkpoints import Checkpoints
from xe_retrieval.training.logs import Log


def train(config, workdir, devices=None, allow_config_change=False):
  """Trains until config.steps, from the latest checkpoint of `workdir` if there is one."""
  mesh = mesh_lib.make(devices)
  workdir = paths.absolute(workdir)
  if config.profile_steps and paths.is_remote(workdir):
    raise ValueError(f"config.profile_steps={config.profile_steps!r} needs a local workdir")
  if not config.first_stage:
    raise ValueError("re-rank what? --config.first_stage=DIR is the workdir of a dual encoder")
  settings.validate(config, mesh.size)
  first = FirstStage(config.first_stage)
  config = settings.resolve(config, first)
  pipeline.require_batch(pipeline.Source(config.data.name, config.data.dir, "train"), config)
  changed = loop.write_config(workdir, config, allow_config_change)

  training, validation = first.split("train"), first.split("validation")
  mined = first.mined(training, config.mined)
  built = step.build(config, mesh)
  say = print if processes.is_primary() else lambda line: None
  checkpoints = Checkpoints(workdir, config.keep_checkpoints, config.keep_every, say=say)
  state = checkpoints.resume(like=built.state)
  state = step.init(config, built) if state is None else state
  start = int(state.step)
  log = Log(workdir, config, start)
  log.say(_introduction(config, state, training, mesh, start))
  for line in changed:
    log.say(f"changed: {line}")
  shard = (jax.process_index(), jax.process_count())
  found = batches.Batches(training, mined, config, *shard)(start)
  follow = loop.Steps(config, workdir, mesh, training.source, checkpoints, log)
  return follow(state, built.train_step, found, measure(config, validation))


def measure(config, split):
  """A function from variables to Recall@k and PR-AUC of some captions of a split, re-ranked."""
  count = min(config.validation_captions, len(split.pairs.text))
  captions = np.linspace(0, len(split.pairs.text) - 1, count).astype(int)
  weight = 1 / config.first_weight if config.first_weight else measures.WEIGHTS[-1]

  def figures(variables):
    variables = mesh_lib.local(variables, mesh_lib.make(jax.local_devices()[:1]))
    scorer = Scorer(config, jax.device_get(variables["params"]["joint"]))
    found, _ = lists.read(split, scorer, config.validation_candidates, captions)
    return measures.figures(found, weight)

  return figures


def _introduction(config, state, split, mesh, start):
  parameters = sum(x.size for x in jax.tree.leaves(state.params))
  shape = " × ".join(map(str, Scorer(config, None).image_shape))
  return (
    f"{config.loss} on lists of {config.candidates}: {parameters:,} parameters, {shape} numbers "
    f"stored of an image, {len(split.source):,} images of {config.data.name}, batch "
    f"{config.batch_size} on {mesh.size} {mesh.devices.flat[0].platform} device(s)"
    + (f" of {jax.process_count()} processes" if jax.process_count() > 1 else "")
    + (f", resuming after step {start}" if start else "")
  )


def describe(config) -> str:
  """What `main --dry_run` prints."""
  settings.validate(config)
  first = FirstStage(config.first_stage)
  config = settings.resolve(config, first)
  state = jax.eval_shape(lambda: step.variables(config, step.joint.from_config(config)))
  parameters = sum(x.size for x in jax.tree.leaves(state))
  pairs = config.batch_size * config.candidates
  return (
    f"{config.loss} on {config.data.name}: {parameters:,} parameters, {pairs:,} pairs and "
    f"{config.batch_size * (1 + config.hard):,} images in a step, "
    f"{Scorer(config, None).bytes_per_image:,} bytes stored of an image"
  )
