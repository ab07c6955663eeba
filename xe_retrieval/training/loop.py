"""The training loop, read top to bottom like the paper's training section."""

import contextlib
import dataclasses
import gc
import json

import jax
from etils import epath
from ml_collections import ConfigDict

from xe_retrieval import config as config_lib
from xe_retrieval import losses
from xe_retrieval.data import decoding, paths, pipeline, tokenization
from xe_retrieval.data import mesh as mesh_lib
from xe_retrieval.towers import dual_encoder, pretrained
from xe_retrieval.training import features, optimizers, processes, step, utilization
from xe_retrieval.training.checkpoints import Checkpoints
from xe_retrieval.training.logs import Log


def train(
  config, workdir, make_validation, devices=None, allow_config_change=False
) -> step.TrainState:
  """Trains until config.steps, from the latest checkpoint of `workdir` if there is one.

  `make_validation(config, model, tokenizer, source, tables, devices)` returns a function from
  variables to metrics of the validation split, with "pr_auc" among them. It is an argument because
  evaluation imports training and not vice versa; main.py connects the two.
  """
  mesh = mesh_lib.make(devices)
  workdir = paths.absolute(workdir)
  if config.profile_steps and paths.is_remote(workdir):
    raise ValueError(f"config.profile_steps={config.profile_steps!r} needs a local workdir")
  given = config
  config, source, validation, tokenizer = prepare(given, mesh, workdir)
  changed = _write_config(workdir, given, config, tokenizer, allow_config_change)

  built = step.build(config, mesh)
  say = print if processes.is_primary() else lambda line: None
  checkpoints = Checkpoints(workdir, config.keep_checkpoints, config.keep_every, say=say)
  state = checkpoints.resume(like=built.state)
  if state is None:
    variables = jax.device_get(pretrained.load(config, dual_encoder.init(config, built.model)))
  else:  # the checkpoint has the weights: they are not fetched again
    variables = _frozen_towers(config, state, mesh)
  tables = {s.split: features.tables(config, variables, tokenizer, s) for s in (source, validation)}
  if state is None:
    variables = features.standardised(config, variables, tables["train"])
    state = step.init(config, variables, built.optimizer, mesh)
  del variables
  start = int(state.step)
  log = Log(workdir, config, start, utilization.peak_seconds(built, mesh))
  log.say(_introduction(config, state, source, mesh, start))
  for line in changed:
    log.say(f"changed: {line}")
  evaluate = make_validation(
    config, built.model, tokenizer, validation, tables["validation"], devices
  )
  shard = (jax.process_index(), jax.process_count())
  batches = features.batches(source, tokenizer, config, tables["train"], start, *shard)
  follow = Steps(config, workdir, mesh, source, checkpoints, log)
  return follow(state, built.train_step, batches, evaluate)


@dataclasses.dataclass(frozen=True)
class Steps:
  """The steps of a run, whatever it trains, with its checkpoints and logs."""

  config: ConfigDict
  workdir: epath.Path
  mesh: jax.sharding.Mesh
  source: pipeline.Source  # whose records `pipeline.choice` chooses
  checkpoints: Checkpoints
  log: Log

  def __call__(self, state, train_step, batches, evaluate):
    """Goes on from `state` until config.steps or an interruption -> the state then.

    `batches` are NumPy's, from state.step on; `evaluate` is a function from variables to metrics
    of the validation split.
    """
    config, workdir, mesh, log = self.config, self.workdir, self.mesh, self.log
    start = int(state.step)
    batches = pipeline.to_devices(batches, mesh_lib.rows(mesh))
    profiled = [n for n in config_lib.profiled(config) if n > start]
    previous = None

    interruption = processes.Interruption(mesh)  # until the last save has ended
    with interruption as interrupted, self.checkpoints, log, _frozen_garbage():
      for n in range(start + 1, config.steps + 1):
        if n in profiled[:1]:
          jax.profiler.start_trace(str(workdir / "profile"))
        with log.waiting():
          batch = next(batches)
        state, metrics = train_step(state, batch)
        _require_finite(previous, self.source, config, workdir)  # this step runs meanwhile
        previous = (n, metrics)
        stop = interrupted()
        last = n == config.steps or stop
        validating = n % config.eval_every == 0 or n == config.steps
        if n in profiled and (n == profiled[-1] or last):
          jax.block_until_ready(state)
          jax.profiler.stop_trace()
        if n % config.log_every == 0 or last:
          log.train(n, jax.device_get(metrics))
        if validating or last or n % config.checkpoint_every == 0:
          _require_finite(previous, self.source, config, workdir)  # waits for the step
          with log.excluded():
            quality = None
            if validating:
              validated = evaluate(jax.device_put(state.variables(), mesh_lib.replicated(mesh)))
              log.validation(n, validated)
              quality = {"pr_auc": validated["pr_auc"]}
            self.checkpoints.save(state, quality, config_lib.to_json(config))
        if stop and n < config.steps:
          log.say(f"stopped after step {n}; the same command goes on from there")
          break
    return state


@contextlib.contextmanager
def _frozen_garbage():
  """Moves objects that exist now out of the garbage collector's reach.

  A full collection over all imported libraries would stall a step by 0.1 s.
  """
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()


def _frozen_towers(config, state, mesh):
  """What cached features are computed with: such towers are as they were before the first step."""
  if not features.cacheable(config):
    return {}
  frozen = {"params": state.params, "batch_stats": state.batch_stats}
  frozen = jax.device_put(frozen, mesh_lib.replicated(mesh))
  return mesh_lib.local(frozen, mesh_lib.make(mesh.local_devices))


def prepare(config, mesh, workdir=None):
  """-> the config with every field filled in, train and validation source, tokenizer.

  A run that has begun knows its pretrained towers and its tokenizer; else one process fetches them
  while the others wait.
  """
  known = None if workdir is None else _known_towers(workdir, config)
  if "" in processes.exchange("known towers", "" if known is None else "known"):
    known = None
  if known is None:
    with processes.primary_first("towers"):
      config = pretrained.configure(config)
  else:
    config = config_lib.updated(config, known)
    pretrained.check(config)  # config.text.tokens, … may be others than before
  validate(config, mesh.size)
  with processes.primary_first("data"):  # which may have to be prepared
    source = pipeline.Source(config.data.name, config.data.dir, "train")
    validation = pipeline.Source(config.data.name, config.data.dir, "validation")
  pipeline.require_batch(source, config)  # before features are computed for nothing
  if config.text.pretrained:
    if known is None:
      tokenizer = pretrained.tokenizer(config)
    else:
      tokenizer = tokenization.load(workdir / "tokenizer", config.text)
  else:
    tokenizer = tokenization.train(
      source.captions().flat, config.text.vocab_size, config.text.tokens
    )
    config.text.vocab_size = tokenizer.vocab_size
    if config.text.get("family") == "clip":  # which pools the end of the text
      with config.unlocked():
        config.text.eos = tokenizer.end
  return config, source, validation, tokenizer


def validate(config, devices: int = 1) -> None:
  """ValueError that names the first field with an invalid value, and what is allowed."""
  choices = {
    "loss": losses.names(),
    "loss_implementation": losses.IMPLEMENTATIONS,
    "data.augment": decoding.AUGMENTS,
    "text.optimizer": optimizers.OPTIMIZERS,
    "image.optimizer": optimizers.OPTIMIZERS,
  }
  config_lib.validate(config, devices, choices)
  dual_encoder.from_config(config)  # the towers check their own fields


_TOWERS = "towers.json"  # what a run's pretrained towers were found to be
_SOURCES = ("pretrained", "text.pretrained", "text.revision", "image.pretrained", "image.revision")
_SOURCES += ("scale", "text.tokens")  # 0: that of config.pretrained
_SOURCES += ("image.size", "image.mean", "image.std", "image.layers")  # of towers side by side


def _known_towers(workdir, config):
  """{field: value} that the towers of this config brought with them; None: not known yet."""
  path = workdir / _TOWERS
  with _reporting(workdir, "read"):
    written = path.read_bytes() if path.exists() else b"{}"
  try:
    known = json.loads(written)
  except ValueError:  # damaged: the towers tell it again
    return None
  return known["fields"] if known.get("of") == _sources(config) else None


def _sources(config):
  fields = config_lib.flat(config)
  return json.loads(json.dumps({name: fields.get(name, "") for name in _SOURCES}))  # no tuples


def _write_config(workdir, given, config, tokenizer, allow_change):
  def more():
    tokenizer.save(workdir / "tokenizer")
    before, found = config_lib.flat(given), config_lib.flat(config)
    brought = {k: v for k, v in found.items() if k not in before or before[k] != v}
    about = {"of": _sources(given), "fields": brought}
    paths.write(workdir / _TOWERS, json.dumps(about, indent=2))

  return write_config(workdir, config, allow_change, more)


def write_config(workdir, config, allow_change, more=lambda: None) -> list[str]:
  """Writes the config -> changes against the workdir's; refused unless allowed.

  config.json is written last, after what `more` writes, and atomically: a workdir without it was
  never trained in.
  """
  path, changed = workdir / "config.json", []
  with processes.primary_first("config"), _reporting(workdir):
    known = path.read_text() if path.exists() else ""
    if known:
      changed = config_lib.difference(config_lib.from_json(known), config)
    if changed and not allow_change:
      raise ValueError(
        f"{workdir} was trained with another config; choose a new workdir, undo, or go on with "
        "--allow_config_change:\n  " + "\n  ".join(changed)
      )
    if processes.is_primary():
      workdir.mkdir(parents=True, exist_ok=True)
      if changed or not known:
        more()
      paths.write(path, config_lib.to_json(config))  # fails if the workdir is read-only
  return changed


@contextlib.contextmanager
def _reporting(workdir, doing="written"):
  """One sentence for what a disk raises, and clients of buckets, which have types of their own."""
  try:
    yield
  except ValueError:
    raise
  except Exception as error:
    failure = f"{type(error).__name__}: {processes.line(error)}"
    raise ValueError(f"the workdir {workdir} cannot be {doing} ({failure})") from error


def _introduction(config, state, source, mesh, start):
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
  return (
    f"{config.loss}: {count(state.params['text']):,} text and {count(state.params['image']):,} "
    f"image parameters, {len(source):,} images of {config.data.name}, batch {config.batch_size} "
    f"on {mesh.size} {mesh.devices.flat[0].platform} device(s)"
    + (f" of {jax.process_count()} processes" if jax.process_count() > 1 else "")
    + (f", resuming after step {start}" if start else "")
  )


def _require_finite(previous, source, config, workdir):
  """Stops at a loss, gradient or update that is NaN or infinite, before it is saved.

  `previous` is (step, its metrics), or None before the first step.
  """
  if previous is None or previous[1]["finite"]:
    return
  n, metrics = previous[0], {name: float(x) for name, x in jax.device_get(previous[1]).items()}
  records = [int(i) for i in pipeline.choice(len(source), config)(n - 1)[0]]
  ids = source.column("image_id")[records].tolist()
  report = workdir / f"not_finite_{n}.json"
  if processes.is_primary():
    found = {"step": n, "metrics": metrics, "records": records, "image_ids": ids}
    report.write_text(json.dumps(found, indent=2))
  of = lambda kind: ", ".join(  # noqa: E731
    f"{name.removeprefix(kind)} {metrics[name]:.3g}"
    for name in sorted(metrics, reverse=True)  # text before image
    if name.startswith(kind)
  )
  raise FloatingPointError(
    f"step {n} is not finite: loss {metrics['loss']:.6g}, gradient norms {of('gradient_norm/')}, "
    f"learning rates {of('learning_rate/')}; image ids of its batch: "
    f"{', '.join(map(str, ids[:8]))}{', …' if len(ids) > 8 else ''} (all in {report}). "
    "The checkpoint before this step is kept."
  )
