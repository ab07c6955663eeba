"""Which runner, and Beam's own options."""

import argparse
import contextlib
import io
import logging
import shlex
import sys
import threading
from typing import NamedTuple

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options import pipeline_options
from apache_beam.runners.portability.fn_api_runner import fn_runner
from apache_beam.transforms import environments


class Settings(NamedTuple):
  """The name of a runner and Beam's own options."""

  runner: str
  arguments: list[str] = []
  quiet: bool = True  # nothing but our own sentences

  def options(self) -> pipeline_options.PipelineOptions:
    """ValueError that names the first option that Beam does not know."""
    parser = argparse.ArgumentParser(conflict_handler="resolve", allow_abbrev=False)
    for kind in pipeline_options.PipelineOptions.__subclasses__():
      with contextlib.suppress(AttributeError):
        kind._add_argparse_args(parser)
    said = io.StringIO()
    try:
      with contextlib.redirect_stderr(said):
        _, unknown = parser.parse_known_args(self.arguments)
    except SystemExit:
      wrong = said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
      raise ValueError(f"Beam's options, after --: {wrong}") from None
    # Job servers of other runners have more options, which only they know.
    if unknown and self.runner == "DirectRunner":
      raise ValueError(f"Beam's options, after --: there is no {unknown[0]}")
    runner = {} if self.runner == "DirectRunner" else {"runner": self.runner}
    return pipeline_options.PipelineOptions(self.arguments, **runner)

  def use(self) -> None:
    """Lets this process open files as the options say."""
    FileSystems.set_options(self.options())

  def pipeline(self) -> beam.Pipeline:
    options = self.options()
    if self.runner != "DirectRunner":
      try:
        return beam.Pipeline(options=options)
      except ValueError as e:  # a line for each option that is missing
        raise ValueError(f"--runner={self.runner}: {' '.join(str(e).split())}") from e
    # Named "DirectRunner", Beam would first try to download another runner, in Go.
    direct = options.view_as(pipeline_options.DirectOptions)
    environment = None
    if direct.direct_running_mode == "multi_processing":
      direct.direct_running_mode = "in_memory"  # that of this process, overridden here
      command = f"{shlex.quote(sys.executable)} -m apache_beam.runners.worker.sdk_worker_main"
      command += " 2>/dev/null" if self.quiet else ""  # each worker logs a dozen lines
      environment = environments.SubprocessSDKEnvironment.from_command_string(command)
    return beam.Pipeline(fn_runner.FnApiRunner(environment), options)


@contextlib.contextmanager
def silence():
  """Of Beam's loggers and threads, whose tracebacks repeat what we say in a sentence."""
  logger, hook = logging.getLogger("apache_beam"), threading.excepthook
  level = logger.level
  logger.setLevel(logging.CRITICAL + 1)
  threading.excepthook = lambda _: None
  try:
    yield
  finally:
    logger.setLevel(level)
    threading.excepthook = hook
