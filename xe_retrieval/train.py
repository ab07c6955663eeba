"""The training loop, read top to bottom like the paper's training section."""

import signal
import time

import jax
from etils import epath

from xe_retrieval import settings
from xe_retrieval.data import pipeline, text
from xe_retrieval.retrieval import embed, metrics
from xe_retrieval.towers import pretrained
from xe_retrieval.training import build, features, step
from xe_retrieval.training import mesh as mesh_lib
from xe_retrieval.training.checkpoints import Checkpoints
from xe_retrieval.training.logs import Log


def train(config, workdir, devices=None) -> step.TrainState:
  """Trains to config.steps, from the latest checkpoint of `workdir` if it has one."""
  config = pretrained.configure(config)
  mesh = mesh_lib.make(devices)
  settings.validate(config, mesh.size)
  workdir = epath.Path(workdir).expanduser()
  source = pipeline.Source(config.data.name, config.data.dir, "train")
  validation = pipeline.Source(config.data.name, config.data.dir, "validation")
  tokenizer = _tokenizer(config, source)
  if not config.text.pretrained:
    config.text.vocab_size = tokenizer.vocab_size
  _claim(workdir, config, tokenizer)

  built = build.build(config, mesh)
  model, train_step = built.model, built.train_step
  variables = pretrained.load(config, step.init_variables(config, model))
  tables = {
    s.split: features.tables(config, model, variables, tokenizer, s) for s in (source, validation)
  }
  state = step.init(config, variables, built.optimizer, mesh)

  checkpoints = Checkpoints(workdir, config.keep_checkpoints)
  start = checkpoints.latest() or 0
  if start:
    state = checkpoints.restore(start, like=state)
  log = Log(workdir, config.steps, config.batch_size, start)
  log.say(_introduction(config, state, source, mesh, start))
  encoder = embed.Encoder(config, model, None, tokenizer, devices)
  batches = features.batches(source, tokenizer, config, tables["train"], start)
  batches = pipeline.to_devices(batches, mesh_lib.rows(mesh))

  with _Interruption() as interrupted:
    for n in range(start + 1, config.steps + 1):
      asked = time.perf_counter()
      batch = next(batches)
      log.waited(time.perf_counter() - asked)
      state, measured = train_step(state, batch)
      last = n == config.steps or interrupted()
      if n % config.log_every == 0 or last:
        log.train(n, jax.device_get(measured))
      validated = None
      if n % config.eval_every == 0 or n == config.steps:
        encoder.variables = {"params": state.params, "batch_stats": state.batch_stats}
        validated = metrics.headline(embed.embed(encoder, validation, tables["validation"]))
        log.validation(n, validated)
      if n % config.checkpoint_every == 0 or validated or last:
        checkpoints.save(state, validated and {"pr_auc": validated["pr_auc"]})
        log.rest()
      if interrupted():
        log.say(f"stopped after step {n}; the same command goes on from there")
        break
  checkpoints.close()
  log.close()
  return state


def _tokenizer(config, source):
  """The pretrained tower's, or one made for the training captions."""
  if config.text.pretrained:
    return text.load(config.text.pretrained, config.text.tokens)
  captions = [caption for captions in source.captions() for caption in captions]
  return text.train(captions, config.text.vocab_size, config.text.tokens)


def _claim(workdir, config, tokenizer):
  """Writes config and tokenizer, or makes sure that the workdir is of this very config."""
  path = workdir / "config.json"
  if path.exists():
    changed = settings.difference(settings.from_json(path.read_text()), config)
    if changed:
      raise ValueError(
        f"{workdir} was trained with another config; choose a new workdir, or undo:\n  "
        + "\n  ".join(changed)
      )
    return
  workdir.mkdir(parents=True, exist_ok=True)
  tokenizer.save(workdir / "tokenizer")
  path.write_text(settings.to_json(config))


def _introduction(config, state, source, mesh, start):
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
  return (
    f"{config.loss}: {count(state.params['text']):,} text and {count(state.params['image']):,} "
    f"image parameters, {len(source):,} images of {config.data.name}, batch {config.batch_size} "
    f"on {mesh.size} {mesh.devices.flat[0].platform} device(s)"
    + (f", resuming after step {start}" if start else "")
  )


class _Interruption:
  """Ctrl-C and SIGTERM let the step finish and the state be saved; a second one kills as usual."""

  def __enter__(self):
    self._asked = False
    self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
    return lambda: self._asked

  def __exit__(self, *_):
    for s, handler in self._before.items():
      signal.signal(s, handler)

  def _ask(self, number, frame):
    self._asked = True
    signal.signal(number, self._before[number])
