"""What people see of a run: a terminal line, metrics.jsonl, TensorBoard."""

import json
import sys
import time

from etils import epath

from xe_retrieval.data.cpu_tensorflow import tf


class Log:
  """Writes the same numbers to three places; on a terminal one line is steadily updated."""

  def __init__(self, workdir, steps: int, batch_size: int, start: int):
    self._jsonl = (epath.Path(workdir) / "metrics.jsonl").open("a")
    self._board = tf.summary.create_file_writer(str(epath.Path(workdir) / "tensorboard"))
    self._steps, self._batch_size = steps, batch_size
    self._step, self._time, self._waited = start, time.perf_counter(), 0.0
    self._began = None  # (step, time) once compilation is over
    self._live = sys.stdout.isatty()

  def waited(self, seconds: float) -> None:
    """Adds time in which the devices had nothing to do because data was not there yet."""
    self._waited += seconds

  def train(self, step: int, metrics: dict) -> None:
    """Metrics of the step just taken, with the speed since the last call."""
    now = time.perf_counter()
    count, seconds = step - self._step, now - self._time
    speed = {
      "pairs_per_second": count * self._batch_size / seconds,
      "data_wait_ms": 1e3 * self._waited / count,
    }
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
    self.rest()

  def rest(self) -> None:
    """What was just done (validation, a checkpoint) does not count against the step's speed."""
    now = time.perf_counter()
    if self._began:
      self._began = (self._began[0], self._began[1] + now - self._time)
    self._time = now

  def say(self, line: str) -> None:
    self._print(line, transient=False)

  def close(self) -> None:
    if self._live:
      print(flush=True)
    self._jsonl.close()
    self._board.close()

  def _write(self, step, metrics):
    values = {name: float(value) for name, value in metrics.items()}
    self._jsonl.write(json.dumps({"step": step, **values}) + "\n")
    self._jsonl.flush()
    with self._board.as_default(step):
      for name, value in values.items():
        tf.summary.scalar(name, value)

  def _print(self, line, transient):
    if self._live:
      print(f"\r\033[K{line}", end="" if transient else "\n", flush=True)
    else:
      print(line, flush=True)


def _clock(seconds):
  minutes, seconds = divmod(int(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
