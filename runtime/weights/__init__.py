"""Weights that stay compressed in memory and are tensors all the same: parameters of unchanged modules.

    weight = PackedWeight.of(dense)                   or AnsWeight.of(dense)
    linear.weight = nn.Parameter(weight, requires_grad=False)

They have the shape, dtype and device of the dense weight. What is done with them:

| operation                                       | PackedWeight            | exact, and AnsWeight          |
|-------------------------------------------------|-------------------------|-------------------------------|
| F.linear, x @ w.t(), addmm; x @ w `transposed`  | from the packed form    | decoded to a shared buffer    |
| x @ w                                           | decoded                 | the same, up to LARGEST bytes |
| F.embedding, w[indices]                         | only the rows looked up | AnsWeight: decoded            |
| w.t(), w.mT, w[i] and unbind of experts         | as compressed           | as compressed                 |
| detach, clone, deepcopy, to(device), state_dict | as compressed           | as compressed                 |
| all others: other products and views, to(dtype) | decoded, to a copy      | decoded, to a copy            |
| writing, pickle, to(dtype) of a module          | refused                 | refused                       |

So they cannot be trained, but gradients flow through them. `dense()` is the explicit way to decode.

What exact weights and AnsWeights yield is what the dense weight yields, bit for bit, up to LARGEST bytes; of
larger ones some rows are decoded and multiplied at a time, and a library may sum smaller products in another
order. Experts are matrices: each is decoded by itself.

What torch.compile traces decodes to fresh memory.

GridWeight does what a PackedWeight does that is not exact, for a matrix that is stored quantized: it holds
codes in a fixed width.

BitWeight is another kind: a stored ternary matrix on its way into a model. Every operation decodes it.
"""

from neuzip.runtime.weights import operations as operations
from neuzip.runtime.weights.ans import AnsWeight as AnsWeight
from neuzip.runtime.weights.base import CompressedWeight as CompressedWeight
from neuzip.runtime.weights.base import WeightUse as WeightUse
from neuzip.runtime.weights.bit import BitWeight as BitWeight
from neuzip.runtime.weights.grid import GridWeight as GridWeight
from neuzip.runtime.weights.packed import PackedWeight as PackedWeight
