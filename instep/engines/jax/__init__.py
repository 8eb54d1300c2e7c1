"""The JAX engine. Importing any of its modules first sets what XLA reads while `jax` is imported."""

from instep.engines.jax import environment

environment.prepare()
