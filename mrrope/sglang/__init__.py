"""A plugin of SGLang: MrRoPE's rope types in the engine, with the ops of this package and a scale per request.

SGLang finds :func:`mrrope.sglang.plugin.register` by its entry point and calls it in its processes: the front end, the
schedulers and the detokenizer. Of a model that names none of mrrope's types only the configuration is looked at.
"""
