"""Metrics of a run: a terminal line, metrics.jsonl, TensorBoard, Weights & Biases."""

import contextlib
import hashlib
import json
import sys
import tempfile
import time

from etils import epath

from xe_retrieval.data import paths
from xe_retrieval.training import processes


class Log:
  """Writes the same numbers to every writer; on a terminal, one line is updated in place.

  Only process 0 writes. `peak_seconds` of a step (utilization.py), if known, gives the MFU.
  """

  def __init__(self, workdir, config, start: int, peak_seconds: float | None = None):
    self._workdir, self._peak_seconds = epath.Path(workdir), peak_seconds
    self._steps, self._batch_size = config.steps, config.batch_size
    self._step, self._time, self._waited = start, time.perf_counter(), 0.0
    self._began = None  # (step, time) after compilation
    self._live = sys.stdout.isatty()
    self._primary, self._warned = processes.is_primary(), False
    self._writers = []
    if self._primary:
      self._writers = [_Jsonl(self._workdir / "metrics.jsonl", start), _TensorBoard(self._workdir)]
      if config.wandb:
        self._writers.append(_Wandb(self._workdir, config))

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  @contextlib.contextmanager
  def waiting(self):
    """Measures the time in which the devices wait for data."""
    before = time.perf_counter()
    yield
    self._waited += time.perf_counter() - before

  def train(self, step: int, metrics: dict) -> None:
    """Logs metrics of a step and the speed since the last call."""
    now = time.perf_counter()
    count, seconds = step - self._step, now - self._time
    speed = {
      "pairs_per_second": count * self._batch_size / seconds,
      "data_wait_ms": 1e3 * self._waited / count,
      "data_wait_share": self._waited / seconds,
    }
    if self._peak_seconds:
      speed["mfu"] = self._peak_seconds * count / seconds
    self._step, self._time, self._waited = step, now, 0.0
    self._began = self._began or (step, now)
    self._write(step, {**metrics, **speed})
    done, since = step - self._began[0], now - self._began[1]
    left = f"{_clock((self._steps - step) * since / done)} left" if done else "compiled"
    line = (
      f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {metrics['loss']:.4f}  "
      f"{speed['pairs_per_second']:,.0f} pairs/s  waiting for data "
      f"{speed['data_wait_ms']:.1f} ms/step  {left}"
    )
    self._print(line, transient=True)

  def validation(self, step: int, metrics: dict) -> None:
    to_image = metrics["text_to_image"]
    flat = {"pr_auc": metrics["pr_auc"], **to_image}
    self._write(step, {f"validation/{name}": value for name, value in flat.items()})
    recall = ", ".join(f"@{k} {to_image[f'recall@{k}']:.1f}" for k in (1, 5, 10))
    self.say(f"step {step}: validation PR-AUC {metrics['pr_auc']:.2f}, recall {recall}")

  @contextlib.contextmanager
  def excluded(self):
    """Excludes the time of a block (validation, a checkpoint) from the speed.

    No step may still be running when it starts: its time would be lost.
    """
    before = time.perf_counter()
    yield
    spent = time.perf_counter() - before
    self._time += spent
    if self._began:
      self._began = (self._began[0], self._began[1] + spent)

  def say(self, line: str) -> None:
    self._print(line, transient=False)

  def close(self) -> None:
    if self._live and self._primary:
      print(flush=True)
    for writer in self._writers:
      with contextlib.suppress(Exception):  # reported by _write
        writer.close()

  def _write(self, step, metrics):
    """A full disk or an absent network is reported once and does not end the run: it may pass."""
    values = {name: float(value) for name, value in metrics.items() if name != "finite"}
    failed = False
    for writer in self._writers:
      try:
        writer.write(step, values)
      except Exception as error:  # TensorFlow and clients of buckets have types of their own
        failed = True
        if not self._warned:
          self.say(f"WARNING: metrics of step {step} cannot be written to {self._workdir}: {error}")
    self._warned = failed

  def _print(self, line, transient):
    if not self._primary:
      return
    if self._live:
      print(f"\r\033[K{line}", end="" if transient else "\n", flush=True)
    else:
      print(line, flush=True)


class _Jsonl:
  """One line per call; drops lines after the checkpoint we resume from: they are written again."""

  def __init__(self, path, start):
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if _step(line) <= start]
    if len(kept) < len(lines):
      paths.write(path, "".join(kept))
    self._path, self._lines = path, kept
    self._file = None if paths.is_remote(path) else path.open("a")

  def write(self, step, values):
    line = json.dumps({"step": step, **values}) + "\n"
    if self._file:
      self._file.write(line)
      self._file.flush()
    else:  # a bucket cannot append
      self._lines.append(line)
      paths.write(self._path, "".join(self._lines))

  def close(self):
    if self._file:
      self._file.close()


def _step(line):
  try:
    return json.loads(line)["step"]
  except ValueError:  # truncated by a kill
    return float("inf")


class _TensorBoard:
  """A file of events, in a bucket a copy of a local one."""

  def __init__(self, workdir):
    from xe_retrieval.data.cpu_tensorflow import tf  # 0.4 GB, and only process 0 comes here

    self._target, self._scratch = workdir / "tensorboard", None
    if paths.is_remote(workdir):
      self._scratch = tempfile.TemporaryDirectory()
    self._here = epath.Path(self._scratch.name) if self._scratch else self._target
    self._scalar = tf.summary.scalar
    self._board = tf.summary.create_file_writer(str(self._here))

  def write(self, step, values):
    with self._board.as_default(step):
      for name, value in values.items():
        self._scalar(name, value)
    if self._scratch:
      self._board.flush()
      for file in self._here.iterdir():
        paths.write(self._target / file.name, file.read_bytes())

  def close(self):
    self._board.close()
    if self._scratch:
      self._scratch.cleanup()


class _Wandb:
  """A run of the project config.wandb; resuming the workdir resumes it."""

  def __init__(self, workdir, config):
    import wandb

    identity = hashlib.sha256(str(paths.absolute(workdir)).encode()).hexdigest()[:12]
    self._run = wandb.init(
      project=config.wandb,
      dir=None if paths.is_remote(workdir) else str(workdir),
      name=workdir.name,
      id=identity,
      resume="allow",
      config=config.to_dict(),
    )

  def write(self, step, values):
    self._run.log(values, step=step)

  def close(self):
    self._run.finish()


def _clock(seconds):
  minutes, seconds = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
