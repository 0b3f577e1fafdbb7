"""A plugin of vLLM: MrRoPE's rope types in the engine, with the ops of this package and a scale per request.

vLLM finds :func:`mrrope.vllm.plugin.register` by its entry point and calls it in every process: the front end, the
engine core and all workers. Nothing of it runs where no ``rope_parameters`` name one of mrrope's types.
"""
