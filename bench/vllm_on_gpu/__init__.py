"""An unmodified vLLM 0.33.0 with tiny models on one bare H200: what bench/gpu_vllm.py plays with.

``build.sh`` packs vLLM's wheel and what it imports into one folder that such a machine can be sent;
``unpack`` makes a site directory of it there; ``checkpoints`` makes the models, ``engram_model``
puts vLLM's Engram classes on a Llama, and ``engine`` is one engine that does what it is told.
"""
