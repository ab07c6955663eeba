"""The training loop, read top to bottom like the paper's training section."""

import contextlib
import gc
import json
import signal

import jax
from etils import epath

from xe_retrieval import settings
from xe_retrieval.data import pipeline, text
from xe_retrieval.retrieval import embed, metrics
from xe_retrieval.towers import pretrained
from xe_retrieval.training import build, features, flops, processes, step
from xe_retrieval.training import mesh as mesh_lib
from xe_retrieval.training.checkpoints import Checkpoints
from xe_retrieval.training.logs import Log


def train(config, workdir, devices=None, allow_config_change=False) -> step.TrainState:
  """Trains to config.steps, from the latest checkpoint of `workdir` if it has one."""
  mesh = mesh_lib.make(devices)
  workdir = epath.Path(workdir).expanduser()
  config, source, validation, tokenizer = prepare(config, mesh)
  changed = _claim(workdir, config, tokenizer, allow_config_change)

  built = build.build(config, mesh)
  variables = pretrained.load(config, step.init_variables(config, built.model))
  tables = {
    s.split: features.tables(config, built.model, variables, tokenizer, s)
    for s in (source, validation)
  }
  state = step.init(config, jax.device_get(variables), built.optimizer, mesh)
  del variables

  say = print if processes.first() else lambda line: None
  checkpoints = Checkpoints(workdir, config.keep_checkpoints, config.keep_every, say=say)
  state = checkpoints.resume(like=state) or state
  start = int(state.step)
  log = Log(workdir, config, start, flops.per_second_of_peak(built, mesh))
  log.say(_introduction(config, state, source, mesh, start))
  for line in changed:
    log.say(f"changed: {line}")
  encoder = embed.Encoder(config, built.model, None, tokenizer, devices)
  share = (start, jax.process_index(), jax.process_count())
  batches = features.batches(source, tokenizer, config, tables["train"], *share)
  batches = pipeline.to_devices(batches, mesh_lib.rows(mesh))
  profiled, before = settings.profiled(config), None

  with checkpoints, log, _frozen_garbage(), _Interruption(mesh) as interrupted:
    for n in range(start + 1, config.steps + 1):
      if n in profiled and n == max(profiled[0], start + 1):
        jax.profiler.start_trace(str(workdir / "profile"))
      with log.waiting():
        batch = next(batches)
      state, measured = built.train_step(state, batch)
      _require_finite(before, source, config, workdir)  # of the step before, while this one runs
      before = (n, measured)
      stop = interrupted()
      last = n == config.steps or stop
      validate = n % config.eval_every == 0 or n == config.steps
      if n in profiled and (n == profiled[-1] or last):
        jax.block_until_ready(state)
        jax.profiler.stop_trace()
      if n % config.log_every == 0 or last:
        log.train(n, jax.device_get(measured))
      if validate or last or n % config.checkpoint_every == 0:
        _require_finite(before, source, config, workdir)
        validated = None
        if validate:
          encoder.variables = _evaluated(state, mesh)
          validated = metrics.headline(embed.embed(encoder, validation, tables["validation"]))
          log.validation(n, validated)
        checkpoints.save(
          state, validated and {"pr_auc": validated["pr_auc"]}, settings.to_json(config)
        )
        log.rest()
      if stop and n < config.steps:
        log.say(f"stopped after step {n}; the same command goes on from there")
        break
  return state


def prepare(config, mesh):
  """The config with everything filled in, and what it is about: data and tokenizer."""
  config = pretrained.configure(config)
  settings.validate(config, mesh.size)
  with processes.one_after_the_other("data"):  # which may have to be made
    source = pipeline.Source(config.data.name, config.data.dir, "train")
    validation = pipeline.Source(config.data.name, config.data.dir, "validation")
  if config.text.pretrained:
    tokenizer = text.load(config.text.pretrained, config.text.tokens)
  else:
    captions = [caption for captions in source.captions() for caption in captions]
    tokenizer = text.train(captions, config.text.vocab_size, config.text.tokens)
    config.text.vocab_size = tokenizer.vocab_size
  return config, source, validation, tokenizer


def _claim(workdir, config, tokenizer, allow_change):
  """Writes config and tokenizer; what is other than in the workdir's config is refused, or given.

  config.json comes last and in one piece: a workdir without it was never trained in.
  """
  path, changed = workdir / "config.json", []
  with processes.one_after_the_other("claim"):
    if path.exists():
      changed = settings.difference(settings.from_json(path.read_text()), config)
    if changed and not allow_change:
      raise ValueError(
        f"{workdir} was trained with another config; choose a new workdir, undo, or go on with "
        "--allow_config_change:\n  " + "\n  ".join(changed)
      )
    if processes.first():
      try:
        workdir.mkdir(parents=True, exist_ok=True)
        unfinished = workdir / "config.json.tmp"
        unfinished.write_text(settings.to_json(config))  # also tells whether one can write here
        if changed or not path.exists():
          tokenizer.save(workdir / "tokenizer")
        unfinished.replace(path)
      except OSError as error:
        raise ValueError(f"the workdir {workdir} cannot be written: {error}") from error
  return changed


def _introduction(config, state, source, mesh, start):
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
  return (
    f"{config.loss}: {count(state.params['text']):,} text and {count(state.params['image']):,} "
    f"image parameters, {len(source):,} images of {config.data.name}, batch {config.batch_size} "
    f"on {mesh.size} {mesh.devices.flat[0].platform} device(s)"
    + (f" of {jax.process_count()} processes" if jax.process_count() > 1 else "")
    + (f", resuming after step {start}" if start else "")
  )


def _evaluated(state, mesh):
  """The variables that validation sees, all of them on every device."""
  variables = {"params": state.ema or state.params, "batch_stats": state.batch_stats}
  return jax.device_put(variables, mesh_lib.everywhere(mesh))


def _require_finite(taken, source, config, workdir):
  """Stops at a loss, gradient or update that is no number, before it reaches a checkpoint."""
  if taken is None or taken[1]["finite"]:
    return
  n, measured = taken[0], {name: float(x) for name, x in jax.device_get(taken[1]).items()}
  records = [int(i) for i in pipeline.choice(len(source), config)(n - 1)[0]]
  every_id = source.columns("image_id")["image_id"]
  ids = [int(every_id[i]) for i in records]
  report = workdir / f"not_finite_{n}.json"
  if processes.first():
    found = {"step": n, "metrics": measured, "records": records, "image_ids": ids}
    report.write_text(json.dumps(found, indent=2))
  raise FloatingPointError(
    f"step {n} is not finite: loss {measured['loss']:.6g}, gradient norms text "
    f"{measured['gradient_norm/text']:.3g} and image {measured['gradient_norm/image']:.3g}, "
    f"learning rates text {measured['learning_rate/text']:.3g} and image "
    f"{measured['learning_rate/image']:.3g}; image ids of its batch: "
    f"{', '.join(map(str, ids[:8]))}{', …' if len(ids) > 8 else ''} (all in {report}). "
    "The checkpoint before it is kept."
  )


@contextlib.contextmanager
def _frozen_garbage():
  """Python looks for garbage only in what is made from here on, not for 0.1 s in all libraries."""
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()


class _Interruption:
  """Ctrl-C and SIGTERM let the step finish and the state be saved; a second one kills as usual.

  Several processes stop at the same step, one later than any of them was asked to.
  """

  def __init__(self, mesh):
    several = jax.process_count() > 1
    self._anyone, self._answer = processes.anyone(mesh) if several else None, False

  def __enter__(self):
    self._asked = False
    self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
    return self._interrupted

  def __exit__(self, *_):
    for s, handler in self._before.items():
      signal.signal(s, handler)

  def _interrupted(self):
    if not self._anyone:
      return self._asked
    answer, self._answer = self._answer, self._anyone(self._asked)
    return bool(answer)

  def _ask(self, number, frame):
    self._asked = True
    signal.signal(number, self._before[number])
