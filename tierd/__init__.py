"""tierd: lookup tables of large language models, served in time and bit-exact."""

__version__ = "0.1.0"
