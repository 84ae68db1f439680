"""vLLM 0.26 to 0.32 serves compressed folders, and packs the weights of plain ones.

plugin        the entry point "vllm.general_plugins", called in every start of vLLM
config        vLLM's quantization config of the name "neuzip"
options       what a user chooses: residency and exact
loader        vLLM's default loader, which decodes containers
choice        which method each layer of a model gets
methods       vLLM's methods of layers whose weights are packed
experts       vLLM's method of mixtures of experts whose weights are packed
completeness  whether all weights of a model came
reloading     refuses to load weights into a running engine that holds them packed
"""
