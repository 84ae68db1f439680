"""SGLang 0.5.16 to 0.5.23 serves compressed folders, and packs the weights of plain ones.

plugin        the entry point "sglang.srt.plugins", called in every process of SGLang
options       what a user chooses: residency and exact
hooks         config.json and weight files of compressed folders, as SGLang reads them
quantization  SGLang's quantization config of the name "neuzip": which layers are packed
arrival       weights that are packed as soon as all of their parts have come
"""
