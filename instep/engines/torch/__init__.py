"""The PyTorch engine. Importing any of its modules first sets what MPS reads while `torch` is imported."""

from instep.engines.torch import environment

environment.prepare()
