"""Eight virtual CPU devices and one compilation cache for all tests."""

import pathlib

import jax

CACHE = pathlib.Path(__file__).parent.parent / ".cache"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(CACHE / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
