"""What `--json` prints: the keys of every command, with types, units and meaning.

Every document begins with the keys of ENVELOPE. Then follow the keys of the command (COMMANDS), or, if the
command failed before it had a result, the one key `error` (FAILED). Every key of a command is always there.
It is null if there is nothing to say. OBJECTS describes the values of keys and the items of lists.

A type is boolean, integer, number, string, object (with keys that are not listed), the name of one of
OBJECTS, "list of T", or "map of T" (the keys are names). "or null" belongs to the whole type unless it stands
in brackets. A number that is infinite or not a number is null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """One key of an object: its type, its unit ("" if it has none), and what it means."""

    type: str
    unit: str
    meaning: str


Keys = Mapping[str, Key]

_LINE = re.compile(r"(?P<name>\w+) +: (?P<type>[\w() ]+?)(?: \[(?P<unit>[^]]+)\])? +- (?P<meaning>.+)")


def _keys(table: str) -> dict[str, Key]:
    """Keys from lines `name : type [unit] - meaning`; a line that begins with "|" goes on with the meaning.

    >>> _keys("seconds : number [s] - wall time\\n| of the run")
    {'seconds': Key(type='number', unit='s', meaning='wall time of the run')}
    """
    found: dict[str, Key] = {}
    for line in re.sub(r"\n *\| *", " ", table).strip().splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None or match["name"] in found:
            raise ValueError(f"no line of a table of keys: {line!r}")
        found[match["name"]] = Key(match["type"], match["unit"] or "", match["meaning"])
    return found


ENVELOPE = _keys("""
    schema  : integer - version of this description
    neuzip  : string - version of neuzip
    command : string or null - the command that ran, such as compress; null if none was named
""")

FAILED = _keys("""
    error : Error - why there is no result
""")

CONVENTION = _keys("""
        name           : string - token, strided, llama.cpp, lm-eval or bos
        window         : integer [tokens] - length of a window
        stride         : integer or null [tokens] - distance between the starts of windows
        windows        : integer - number of windows
        tokens         : integer - tokens predicted
        documents      : integer - documents of the text
        words          : integer or null - words predicted
        bytes          : integer or null [bytes] - bytes predicted
        special_tokens : string - special tokens in front of each window
""")
"""The keys of a perplexity convention, as it was applied."""

OBJECTS: Mapping[str, Keys] = {
    "Error": _keys("""
        kind      : string - class of the error, such as UsageError, FormatError, WouldOverwrite, OSError
        message   : string - what is wrong, as on stderr
        hint      : string or null - what to do about it, as on stderr
        exit_code : integer - exit code of the process: 1 expected failure, 2 usage error, 3 internal error,
        | 130 interrupted
    """),
    "Estimate": _keys("""
        value          : number or null - the measured value; null if it is not finite
        standard_error : number or null - its standard error, in the same unit; null if there are too few
        | samples
    """),
    "Loss": _keys("""
        max_relative : number - largest |restored - original| / |original| of a non-zero weight
        rms_relative : number - root mean square of |restored - original| / |original|
        relative_l2  : number or null - |restored - original| / |original| of the whole tensor in the L2
        | norm; ternary tensors only
    """),
    "CompressedTensor": _keys("""
        file           : string - weight file
        name           : string - name of the tensor
        dtype          : string - dtype as safetensors writes it
        shape          : list of integer - shape
        scheme         : string - how the tensor is stored: raw, lossless, `k=3` (3 mantissa bits), ternary,
        | alias (same bytes as an earlier tensor), or as in the base
        original_bytes : integer [bytes] - size before
        stored_bytes   : integer or null [bytes] - size after, without headers; predicted in a dry run, null
        | if unknown
        loss           : Loss or null - what rounding did; null if nothing was lost, and in a dry run
        note           : string - why this scheme was chosen, if the choice may surprise; else empty
    """),
    "Target": _keys("""
        option           : string - the option: --max-kld, --max-ppl-increase or --target-size
        asked            : string - its value as given
        limit            : number - the value as a number: nats per token, or bytes for --target-size
        met              : boolean or null - whether the result meets the target; null in a dry run
        sensitivity      : string - how sensitivities were found: measured, fisher or weights
        text             : string or null - the text they were measured on
        special_tokens   : string - special tokens in front of each window of the text
        plan             : string or null - file of the plan (TOML); null in a dry run
        delivered        : Comparison or null - the result compared with the original
        predicted_kld    : number or null [nats per token] - mean KL divergence that the plan predicts
        schemes          : map of integer or null - number of tensors of each scheme
        estimated_groups : integer or null - groups of tensors whose sensitivity was estimated from the
        | weights alone
        trials           : list of Trial or null - plans that were tried; the last one was taken
        dropped_layers   : list of integer - layers that were dropped
        drops            : Drops or null - predictions for --drop-layers
        passed_over      : Trial or null - a plan with more or fewer layers that was tried but not taken
        pays_from        : number or null [nats per token] - predicted smallest limit at which dropping a
        | layer makes the result smaller
    """),
    "Trial": _keys("""
        predicted_kld : number [nats per token] - predicted mean KL divergence
        bytes         : integer [bytes] - size of the weight files
        comparison    : Comparison or null - compared with the original; null without a text or if not finite
    """),
    "Drops": _keys("""
        singles  : list of Drop - each layer left out alone
        steps    : list of Drop - first no dropped layer, then one more in each step
        rejected : Drop or null - the next step, not taken because it was predicted to gain nothing
        refused  : list of string - why some layers were not considered
    """),
    "Drop": _keys("""
        layers     : list of integer - layers left out
        bytes      : integer [bytes] - size of their tensors, uncompressed
        comparison : Comparison or null - the model without them compared with the whole one
        predicted  : number or null - predicted result of a plan without these layers: bytes, or nats per
        | token for --target-size
    """),
    "Comparison": _keys("""
        tokens           : integer - tokens compared
        blocks           : string - samples of the standard errors, such as documents
        base_nll         : Estimate [nats per token] - negative log-likelihood of the original
        other_nll        : Estimate [nats per token] - negative log-likelihood of the compared model
        nll_difference   : Estimate [nats per token] - other_nll - base_nll, paired
        perplexity_ratio : Estimate - perplexity of the compared model / perplexity of the original, paired
        kld              : Divergence - KL divergence of single tokens, KL(original || compared)
        top_1            : Estimate - top-1 agreement: share of tokens with the same most likely prediction,
        | 0 to 1
        top_k            : Estimate - mean share of the k most likely predictions that both have, 0 to 1
        k                : integer - the k of top_k
        identical        : boolean - whether all losses are the same to the last bit and every KL divergence
        | is 0
    """),
    "Divergence": _keys("""
        mean   : Estimate [nats per token] - mean
        median : number or null [nats per token] - median
        p999   : number or null [nats per token] - 99.9th percentile
        max    : number or null [nats per token] - maximum
    """),
    "Calibration": _keys("""
        mode               : string - what was asked for: auto, 8bit or 4bit
        limit              : number or null [nats per token] - budget of mean KL divergence
        offered            : list of integer - precisions to choose from, in bits
        layers             : list of AttentionLayer - each layer
        bits               : list of (integer or null) - the choice: bits of each layer, null for full
        | precision
        sum_of_layers      : number or null [nats per token] - sum of the KL divergences of single layers as
        | chosen
        trials             : list of (number or null) [nats per token] - mean KL divergence of each measured
        | choice for all layers; the last one was taken
        comparison         : Comparison - the model with the choice compared with the original
        text               : string - the text
        window             : integer [tokens] - length of a window
        windows            : integer - number of windows
        tokens             : integer - tokens predicted
        similarity_windows : integer - windows on which similarities were measured
        device             : string - where the model ran
        dtype              : string - dtype it computed in
        seconds            : number [s] - wall time
        versions           : map of string - versions of neuzip, Python, torch, transformers
        special_tokens     : string - special tokens in front of each window
    """),
    "AttentionLayer": _keys("""
        number  : integer - number of the layer
        forms   : list of AttentionForm - attention at each precision that was measured
        refused : string or null - why the attention of this layer cannot be quantised
        bits    : integer or null - the choice; null for full precision
    """),
    "AttentionForm": _keys("""
        bits      : integer - bits of queries and keys
        closeness : Closeness - output compared with exact attention
        kld       : Estimate or null [nats per token] - mean KL divergence with this layer alone quantised
    """),
    "Closeness": _keys("""
        mean        : Similarity - means over windows
        worst       : Similarity - the worst window of each number
        score       : number - mean of cosine * (1 - relative_l1)
        deviation   : number or null - standard deviation of the score over windows
        worst_score : number - the lowest score of a window
    """),
    "Similarity": _keys("""
        cosine      : number - cosine similarity
        relative_l1 : number - sum |o - o'| / sum |o|
        rmse        : number - root mean square of o - o'
    """),
    "Stream": _keys("""
        commit         : string - commit of the source on the Hub
        most_of_source : integer [bytes] - largest size of source weight files on the disk at any time
    """),
    "Pushed": _keys("""
        url       : string - page of the repository
        commit    : string - commit that was made
        deleted   : list of string - files of the older checkpoint that were removed
        files     : list of string - files that were uploaded
        was_there : boolean - whether all files were there already
    """),
    "RestoredTensor": _keys("""
        file           : string - weight file
        name           : string - name of the tensor
        scheme         : string - how the tensor is stored
        original_bytes : integer [bytes] - size uncompressed
        identical      : boolean or null - whether it equals the original bit for bit; null without --original
        max_relative   : number or null - largest relative error, if it differs
        relative_l2    : number or null - relative error in the L2 norm, if it differs
        lossless       : boolean - whether its scheme is lossless
        of_another     : boolean - whether the given original differs from the tensor that was rounded
        base_missing   : boolean - whether neuzip checked only what the delta stores, because --base was not
        | given
    """),
    "InspectedTensor": _keys("""
        file               : string - weight file
        name               : string - name of the tensor
        dtype              : string - dtype as safetensors writes it
        shape              : list of integer - shape
        original_bytes     : integer [bytes] - size uncompressed
        stored_bytes       : integer [bytes] - size compressed; predicted for a plain checkpoint
        scheme             : string - how the tensor is stored, or would be
        loss               : Loss or null - what rounding did
        entropies          : Entropies or null - entropies; null for an empty tensor, a tensor without floats,
        | and in a delta
        used_mantissa_bits : integer or null - mantissa bits that are not zero everywhere
        bound_bytes        : integer or null [bytes] - entropy bound of lossless coding with exponents coded
        base               : string or null - the tensor of the base that a delta needs
    """),
    "Entropies": _keys("""
        sign     : number [bits per weight] - entropy of the sign
        exponent : number [bits per weight] - entropy of the exponent
        mantissa : number [bits per weight] - entropy of the mantissa; an upper bound beyond 10 bits
        joint    : number or null [bits per weight] - entropy of whole weights of up to 16 bits
    """),
    "InspectedTotals": _keys("""
        tensors        : integer - number of tensors
        original_bytes : integer [bytes] - size of the tensors uncompressed, without headers
        stored_bytes   : integer [bytes] - size of the tensors compressed, without headers
        bound_bytes    : integer or null [bytes] - sum of the bounds, if every tensor has one
    """),
    "Histogram": _keys("""
        dtype                 : string - dtype
        weights               : integer - floats of this dtype
        entropies             : Entropies - entropies over all weights of this dtype
        used_mantissa_bits    : integer - mantissa bits that are not zero everywhere
        exponent_bias         : integer - bias of the exponent
        signs                 : list of integer - counts of sign 0 and 1
        exponents             : list of integer - counts of exponents, from 0
        leading_mantissa_bits : integer - mantissa bits that are counted
        mantissas             : list of integer - counts of these leading bits
    """),
    "TensorDifference": _keys("""
        status       : string - identical, different, dtype, shape, only_a or only_b
        a            : Side or null - the tensor of A
        b            : Side or null - the tensor of B
        elements     : integer - number of elements
        differing    : integer or null - elements that differ
        not_finite   : integer or null - differing elements of which one is not finite
        max_absolute : number or null - largest absolute difference
        max_relative : number or null - largest relative difference
        relative_l2  : number or null - |b - a| / |a| in the L2 norm
    """),
    "Side": _keys("""
        file  : string - weight file
        name  : string - name of the tensor
        dtype : string - dtype
        shape : list of integer - shape
    """),
    "ExportedTensor": _keys("""
        name        : string - name of the tensor
        shape       : list of integer - shape
        dtype       : string - dtype in the source
        kind        : string - ternary or dense
        group       : integer or null - weights that share a scale
        scale_error : number - largest relative difference between a scale and the one that the engine
        | computes with
        packing     : string or null - name of its type in the engine
    """),
    "Gpu": _keys("""
        name               : string - its name
        compute_capability : string - such as 9.0
        memory_bytes       : integer [bytes] - its memory
    """),
    "HubFile": _keys("""
        path  : string - path in the repository
        bytes : integer [bytes] - size
    """),
    "EvaluatedModel": _keys("""
        path              : string - the checkpoint
        dtype             : string - dtype it computed in
        weight_bytes      : integer [bytes] - memory of the weights
        tokens_per_second : number [tokens/s] - speed of the model without its head; one pass, so without a
        | standard error
        formed            : string or null - why all logits had to be materialised
        kv_bits           : integer or null - bits of the KV cache
        attention_bits    : list of (integer or null) or null - bits of each layer's attention, null for
        | full precision
        attention_calls   : map of integer - number of attention calls by how they ran
        activations       : Activations or null - how activations of ternary weights were quantised
    """),
    "Activations": _keys("""
        mode  : string - b1.58, a4.8, a4.8-fp4 or none
        sites : object - modes of sites that differ from `mode`
    """),
    "ConventionScores": CONVENTION
    | _keys("""
        blocks         : string - samples of the standard errors, such as documents
        before         : Score or null - the original, with --original
        after          : Score - SRC
    """),
    "Score": _keys("""
        nll              : Estimate [nats per token] - negative log-likelihood
        token_perplexity : Estimate - perplexity per token
        word_perplexity  : Estimate or null - perplexity per word
        byte_perplexity  : Estimate or null - perplexity per byte
        bits_per_byte    : Estimate or null [bits] - bits per byte
        difference       : LossDifference or null - SRC minus the original, paired
    """),
    "LossDifference": _keys("""
        nll          : Estimate [nats per token] - difference of the negative log-likelihoods
        identical    : boolean - whether all losses are the same to the last bit
        nll_per_word : Estimate or null [nats per word] - the same per word
        nll_per_byte : Estimate or null [nats per byte] - the same per byte
    """),
    "PeakMemory": _keys("""
        bytes : integer or null [bytes] - peak memory
        of    : string - which memory this is, in words
    """),
    "Sparsity": _keys("""
        sites      : map of number - share of zero activations of each site, 0 to 1
        overall    : number - share over all sites, weighted by their number of weights
        active     : integer - weights that are multiplied per token
        parameters : integer - weights of these layers
        tokens     : integer - tokens counted
    """),
    "Tasks": _keys("""
        scores  : list of TaskScore - each metric of each task
        harness : string - version of lm-evaluation-harness
    """),
    "TaskScore": _keys("""
        task             : string - name of the task
        metric           : string - name of the metric
        filter           : string - filter of the harness
        version          : string - version of the task
        shots            : integer or null - examples in the prompt
        documents        : integer or null - documents
        higher_is_better : boolean or null - whether higher is better
        after            : Estimate - SRC
        before           : Estimate or null - the original, with --original
        difference       : Estimate or null - after - before, paired
        changed          : integer or null - documents whose value changed
    """),
    "Report": _keys("""
        schema           : integer - version of the report, which --report FILE.json writes too
        title            : string - name of SRC
        command          : string - the command that was given
        versions         : map of string - versions of neuzip, Python, torch, transformers
        base             : string or null - name of the original
        setting          : map of string - text, dtype, device, in words
        identical        : boolean - whether every measured number is the same for both models to the last bit
        perplexity       : list of ReportRow - perplexities
        nll_difference   : Estimate or null [nats per token] - SRC minus the original, paired
        blocks           : string - samples of the standard errors, such as documents
        divergence       : list of ReportRow - KL divergence and agreement
        distribution     : Distribution or null - KL divergence of single tokens
        cost             : list of ReportRow - memory and speed
        tasks            : list of ReportRow - scores of lm-evaluation-harness
        tensors          : list of ReportTensor - each tensor
        missing          : list of string - tensors that only the original has; empty unless --report is given
        original_bytes   : integer or null [bytes] - weight files of the original
        stored_bytes     : integer or null [bytes] - weight files of SRC
        sweep            : list of SweepPoint - what --sweep showed
        sweep_differs    : list of string - settings in which the sweep differs from this evaluation
        when             : string or null - date of the report; null by default
        bits_per_weight  : number or null [bits] - 8 * stored_bytes / number of elements of all tensors
        histograms       : list of Histogram or null - null unless --report is given
    """),
    "ReportRow": _keys("""
        name   : string - what was measured
        after  : Estimate or null - SRC
        before : Estimate or null - the original
        note   : string - how it was measured
        unit   : string - unit
        change : Estimate or null [percent] - change in percent of the original, paired
    """),
    "Distribution": _keys("""
        tokens     : integer - tokens
        zero       : integer - tokens with a KL divergence of exactly 0
        below      : integer - tokens below 1e-12
        counts     : list of integer - tokens from 1e-12 to 100 nats, five bins per power of ten
        above      : integer - tokens above 100
        not_finite : integer - tokens that are infinite or not a number
        quantiles  : map of number [nats] - quantiles
        largest    : number or null [nats] - maximum
    """),
    "ReportTensor": _keys("""
        label        : string - name
        dtype        : string - dtype
        shape        : list of integer - shape
        scheme       : string - how it is stored
        nbytes       : integer [bytes] - size uncompressed
        stored_bytes : integer [bytes] - size stored
        identical    : boolean or null - whether its bytes are those of the original; null if not known
        relative_l2  : number or null - error in the L2 norm, with --report and --original
        rms_relative : number or null - root mean square of the relative errors
        max_relative : number or null - largest relative error
    """),
    "SweepPoint": _keys("""
        scheme          : string - the scheme
        bits_per_weight : number [bits] - bits per weight
        nbytes          : integer [bytes] - size of the weight files
        kld             : Estimate [nats per token] - mean KL divergence
        perplexity      : Estimate - perplexity per token
    """),
    "SpeedRow": _keys("""
        residency                 : string - in-memory weight format: dense, packed or ans
        batch                     : integer [sequences] - batch size
        graphed                   : boolean - whether steps ran as a CUDA graph
        load_seconds              : number [s] - time to load
        weight_bytes              : integer [bytes] - memory of the weights
        prefill_tokens_per_second : number [tokens/s] - prompt processing, median
        decode_tokens_per_second  : number [tokens/s] - generation, median
        peak_bytes                : integer or null [bytes] - peak memory
        tokens                    : integer - tokens generated
        differing_tokens          : integer - tokens that differ from those of the dense model
        same_tokens               : integer or null - tokens before the first difference
        prefill_ratio             : number - prefill speed / that of the dense model
        decode_ratio              : number - decode speed / that of the dense model
        peak_ratio                : number or null - peak memory / that of the dense model
        kv_bits                   : integer or null - bits of the KV cache
        cache_bytes               : integer [bytes] - memory of the KV cache
        attention                 : string or null - how the KV cache was read
        attention_bits            : list of (integer or null) or null - bits of each layer's attention, null
        | for full precision
        attention_calls           : map of integer - number of attention calls by how they ran
        activations               : Activations or null - how activations of ternary weights were quantised
        compiled                  : boolean - whether steps were compiled
        decode_spread             : number - (slowest - fastest) / median of the decode times
    """),
    "SweepRow": _keys("""
        schema                  : integer - version of the row, which the files of --output have too
        scheme                  : string - the scheme
        bytes                   : integer [bytes] - weight files after
        original_bytes          : integer [bytes] - weight files before
        ratio                   : number - bytes / original_bytes
        weights                 : integer - elements of all tensors
        bits_per_weight         : number [bits] - 8 * bytes / weights
        largest_relative_error  : number - largest relative error of a weight
        perplexity              : Estimate - perplexity per token
        tokens                  : integer - tokens compared
        blocks                  : string - samples of the standard errors, such as documents
        base_nll                : Estimate [nats per token] - negative log-likelihood of the original
        other_nll               : Estimate [nats per token] - negative log-likelihood of this scheme
        nll_difference          : Estimate [nats per token] - other_nll - base_nll, paired
        perplexity_ratio        : Estimate - perplexity / perplexity of the original, paired
        kld                     : Divergence - KL divergence of single tokens
        top_1                   : Estimate - top-1 agreement, 0 to 1
        top_k                   : Estimate - mean share of the k most likely predictions that both have, 0
        | to 1
        k                       : integer - the k of top_k
        identical               : boolean - whether all losses are the same to the last bit
        dtype                   : string - dtype it computed in
        memory_bytes            : integer [bytes] - memory of the weights
        peak_bytes              : integer or null [bytes] - peak memory
        load_seconds            : number [s] - time to load
        decode_bytes_per_second : number [bytes/s] - speed of decompression
        tokens_per_second       : number [tokens/s] - tokens fed
        depends_on              : object - settings that must be equal before you compare rows
    """),
    "SweepFailure": _keys("""
        scheme : string - the scheme
        reason : string - why there is no row
    """),
    "LayerImportance": _keys("""
        number                      : integer - number of the layer
        parameters                  : integer - its parameters
        block_influence             : Estimate - 1 - cosine of what goes in and what comes out
        angular_distance            : Estimate [of 180 degrees] - angle between them at the last token
        angular_distance_all_tokens : Estimate [of 180 degrees] - the same at all tokens
        gradient_norm               : Estimate or null - gradient norm of its parameters
        without                     : Comparison or null - the model without it; null if not finite
    """),
    "Distances": _keys("""
        mean           : list of list of number - angular distances: entry [n - 1][l] is from layer l to
        | layer l + n
        standard_error : list of list of (number or null) - their standard errors
    """),
    "Removal": _keys("""
        choice     : string - greedy, block or angular
        layers     : list of integer - layers to drop
        order      : list of integer - the same layers in the order in which they were chosen
        klds       : list of number [nats per token] - mean KL divergence after each choice
        parameters : integer - parameters of the layers to drop
        comparison : Comparison - the model without them
    """),
    "Pruned": _keys("""
        dst          : string - what was written
        dropped      : list of integer - layers that were dropped
        kept         : list of integer - layers that are left
        source_bytes : integer [bytes] - weights before
        bytes        : integer [bytes] - weights after
        warnings     : list of string - warnings
    """),
    "DemoStep": _keys("""
        dst                 : string - what was written
        stored_weight_bytes : integer [bytes] - weight files after
        ratio               : number - stored_weight_bytes / weight_bytes
        bits_per_weight     : number [bits] - 8 * stored_weight_bytes / weights
    """),
    "Convention": CONVENTION,
    "Recipe": _keys("""
        quantizer : string - how weights are rounded
        group     : integer or string or null - weights of a row that share a scale; row for all, null for
        | the tensor
    """),
}

_RESTORED = """
    src            : string - what was read
    dst            : string - what was written
    stored_bytes   : integer [bytes] - size of all files of SRC
    restored_bytes : integer [bytes] - size of all files written
    files          : integer - files written
    lossless       : boolean - whether the result is the original byte for byte
    seconds        : number [s] - wall time
    device         : string - where tensors were decoded
    was_there      : boolean - whether an earlier run had written everything
    base           : string or null - base of a delta
"""

COMMANDS: Mapping[str, Keys] = {
    "compress": _keys("""
        dry_run             : boolean - whether nothing was written; sizes are predicted then
        src                 : string - what was read
        dst                 : string or null - what was written, or would be; null if it went to the Hub alone
        original_bytes      : integer [bytes] - size of all files before
        stored_bytes        : integer or null [bytes] - size of all files after; null if unknown
        weight_bytes        : integer [bytes] - size of the weight files before, headers included
        stored_weight_bytes : integer or null [bytes] - size of the weight files after, headers included
        weights             : integer - elements of all tensors
        ratio               : number or null - stored_weight_bytes / weight_bytes
        bits_per_weight     : number or null [bits] - 8 * stored_weight_bytes / weights
        lossless            : boolean or null - whether every tensor restores byte for byte; predicted in a
        | dry run, null if unknown then
        seconds             : number or null [s] - wall time; null in a dry run
        device              : string or null - where tensors were coded; null in a dry run
        resumed_files       : integer - weight files that an earlier run had finished
        warnings            : list of string - warnings
        private_files       : list of string - files that look private by their names
        tensors             : list of CompressedTensor - each tensor
        target              : Target or null - result of --max-kld, --max-ppl-increase or --target-size
        attention           : Calibration or null - the choice of --attention
        base                : string or null - path of the base of a delta
        base_name           : string or null - name of the base, as the delta records it
        stream              : Stream or null - what --stream did
        pushed              : Pushed or null - what --push-to did
    """),
    "decompress": _keys(_RESTORED),
    "apply": _keys(_RESTORED),
    "verify": _keys("""
        src       : string - what was verified
        original  : string or null - what it was compared with
        base      : string or null - base of a delta
        intact    : boolean - whether every checksum is right; the command fails otherwise
        files     : integer - weight files
        device    : string - where tensors were decoded
        identical : boolean or null - whether every tensor equals the original; null without --original
        tensors   : list of RestoredTensor - each tensor
    """),
    "inspect": _keys("""
        src                 : string - what was read
        delta               : boolean - whether it is a delta, so its weights are unknown without the base
        base_name           : string or null - name of the base of a delta
        device              : string - where weights were counted
        compressed          : boolean - whether it is compressed
        weight_bytes        : integer or null [bytes] - weight files uncompressed, headers included; null
        | with --tensor
        stored_weight_bytes : integer or null [bytes] - weight files compressed, headers included; predicted
        | for a plain checkpoint, null with --tensor
        weights             : integer - elements of all tensors that were looked at
        ratio               : number or null - stored_weight_bytes / weight_bytes
        bits_per_weight     : number or null [bits] - 8 * stored_weight_bytes / weights
        tensors             : list of InspectedTensor - each tensor
        totals              : InspectedTotals - sums over tensors
        histograms          : list of Histogram - one for each dtype
        records             : object - what neuzip recorded in config.json
        plot                : string or null - picture that was written
    """),
    "diff": _keys("""
        a              : string - first checkpoint
        b              : string - second checkpoint
        identical      : boolean - whether all tensors are identical; if not, the exit code is 1
        compared_bytes : integer [bytes] - bytes compared
        totals         : map of integer - number of tensors, in total and by status
        tensors        : list of TensorDifference - each tensor
    """),
    "export": _keys("""
        src            : string - what was read
        dst            : string - what was written
        source_bytes   : integer [bytes] - weight files of SRC
        exported_bytes : integer [bytes] - weight files written
        tensors        : list of ExportedTensor - each tensor
        seconds        : number [s] - wall time
        warnings       : list of string - warnings
        to             : string - gguf, compressed-tensors or transformers-bitnet
        target         : object - the options of that engine
        ternary        : integer - tensors that are ternary
        scale_error    : number - largest relative error of a scale
    """),
    "env": _keys("""
        installed    : string - how neuzip was installed: editable, or from a folder, an archive, git or an
        | index
        commit       : string or null - commit of the repository it was installed from, if pip recorded one
        python       : string - implementation and version of Python
        system       : string - operating system, kernel and libc
        distribution : string or null - the Linux distribution
        packages     : map of (string or null) - version of each package that matters; null if not installed
        torch_cuda   : string or null - the CUDA version that torch was built for
        cpu          : string - name of the CPU
        cores        : integer - cores that the process may use
        vector_codec : boolean or null - whether the CPU codec runs in vector registers; null without numba
        memory_bytes : integer [bytes] - memory of the machine
        driver       : string or null - version of NVIDIA's driver
        driver_cuda  : string or null - the newest CUDA version that the driver runs
        gpus         : list of Gpu - each GPU
        variables    : map of boolean - environment variables that matter, and whether each is set
    """),
    "push": _keys("""
        dry_run       : boolean - whether nothing was uploaded
        src           : string - the folder
        repo_id       : string - the repository
        revision      : string or null - the branch
        url           : string - its page
        commit        : string or null - commit that was made
        was_there     : boolean or null - whether all files were there already
        deleted       : list of string or null - files of the older checkpoint that were removed
        bytes         : integer [bytes] - size of all files
        files         : list of HubFile - files uploaded, or to be uploaded
        private_files : list of string - files that look private by their names
        card          : string - the model card
    """),
    "pull": _keys("""
        dry_run    : boolean - whether nothing was downloaded
        src        : string - the repository
        dst        : string - the folder
        commit     : string - commit on the Hub
        compressed : boolean - whether it holds a compressed checkpoint
        bytes      : integer [bytes] - size of all files
        files      : list of HubFile - files downloaded, or to be downloaded
        left_out   : list of string - files that are not downloaded
        tensors    : integer or null - tensors verified
        was_there  : boolean or null - whether all files were there already
        seconds    : number or null [s] - wall time
    """),
    "eval": _keys("""
        text        : string or null - the text; null without --text, as are all keys up to versions
        documents   : integer or null - its documents
        before      : EvaluatedModel or null - the original, with --original
        after       : EvaluatedModel or null - SRC
        conventions : list of ConventionScores or null - perplexities under each convention
        skipped     : map of string or null - conventions that were left out, and why
        compared    : string or null - the convention of the comparison
        comparison  : Comparison or null - SRC compared with the original
        device      : string or null - where the models ran
        residency   : string or null - in-memory weight format
        memory      : PeakMemory or null - peak memory
        processes   : integer or null - processes
        seconds     : number or null [s] - wall time
        versions    : map of string or null - versions of neuzip, Python, torch, transformers
        sparsity    : Sparsity or null - zero activations, with --sparsity
        tasks       : Tasks or null - scores of lm-evaluation-harness, with --tasks
        page        : string or null - page that --report wrote
        report      : Report or null - the report as --report FILE.json writes it; `push --evaluation` also
        | accepts this JSON output
    """),
    "generate": _keys("""
        prompt               : string - the prompt
        text                 : string - what was generated
        tokens               : list of integer - its tokens
        finish_reason        : string - length if the limit of new tokens ended the text, else stop
        prompt_tokens        : integer - tokens of the prompt
        load_seconds         : number [s] - time to load the model
        seconds              : number [s] - time to generate
        first_token_seconds  : number [s] - time to the first token
        tokens_per_second    : number or null [tokens/s] - speed after the first token
        peak_bytes           : integer or null [bytes] - peak memory
        residency            : string - in-memory weight format
        activations          : Activations or null - how activations of ternary weights were quantised
        kv_bits              : integer or null - bits of the KV cache
        kv_bytes             : integer or null [bytes] - memory of the quantised KV cache
        attention            : string or null - how the KV cache was read
        attention_bits       : list of (integer or null) or null - bits of each layer's attention, null for
        | full precision
        attention_calls      : map of integer - number of attention calls by how they ran
        device               : string - where the model ran
        graphed              : boolean - whether steps ran as a CUDA graph
        not_graphed          : string or null - why steps did not run as a CUDA graph
    """),
    "bench": _keys("""
        src           : string - the model
        prompt_tokens : integer - tokens of the prompt
        new_tokens    : integer - tokens generated
        rounds        : integer - runs of which medians are taken
        compiled      : boolean - whether steps were compiled
        rows          : list of SpeedRow - each in-memory format and batch size
        dtype         : string - dtype the model computed in
        device        : string - where it ran
        versions      : map of string - versions of neuzip, Python, torch, transformers
    """),
    "sweep": _keys("""
        src        : string - the model
        text       : string - the text
        convention : string - how the text was cut into windows
        device     : string - where the model ran
        front      : list of string - schemes that no other beats in both size and KL divergence
        resumed    : integer - schemes that an earlier run had measured
        rows       : list of SweepRow - each scheme
        failed     : list of SweepFailure - schemes whose model is not finite
        output     : string or null - folder of results
    """),
    "layers": _keys("""
        src               : string - the model
        text              : string - the text
        window            : integer [tokens] - length of a window
        windows           : integer - number of windows
        tokens            : integer - tokens predicted
        gradient_windows  : integer - windows of the gradient norms
        layers            : list of LayerImportance - each layer
        last_token        : Distances - angular distances at the last token
        all_tokens        : Distances - angular distances at all tokens
        rank_correlations : map of (number or null) - Spearman correlation of each metric with the measured
        | KL divergence
        removal           : Removal or null - layers to drop, with --drop
        parameters        : integer - parameters of the model
        blocks            : string - samples of the standard errors, such as documents
        device            : string - where the model ran
        dtype             : string - dtype it computed in
        stored_dtype      : string - dtype in the config.json of the model
        seconds           : number [s] - wall time
        versions          : map of string - versions of neuzip, Python, torch, transformers
        special_tokens    : string - special tokens in front of each window
        mergekit          : string or null - the removal as a recipe for mergekit
        written           : Pruned or null - what was written
        plot              : string or null - picture that was written
    """),
    "patch-attention": {
        **_keys("""
            dry_run : boolean - whether nothing was written
            src     : string - the model
            dst     : string - what was written
        """),
        **OBJECTS["Calibration"],
        **_keys("plot : string or null - picture that was written"),
    },
    "ternarize": _keys("""
        src            : string - the model
        dst            : string - what was written
        recipe         : Recipe - how weights were rounded
        tensors        : list of string - tensors that are ternary now
        weights        : integer - their weights
        zeros          : number - share of these weights that are 0
        tokens         : integer - tokens of the text that were used
        special_tokens : string - special tokens in front of each window
        device         : string - where it ran
        dtype          : string - dtype of the model
        seconds        : number [s] - wall time
    """),
    "recover": _keys("""
        src               : string - the model that was trained
        original          : string - the model it learned from
        dst               : string - what was written
        settings          : object - all settings of the training
        steps             : integer - steps taken
        planned_steps     : integer - steps asked for
        resumed_at        : integer - steps that an earlier run had taken
        tokens            : integer - tokens trained on
        text_tokens       : integer - tokens of the text
        seconds           : number [s] - time of the steps
        tokens_per_second : number [tokens/s] - speed
        tensors           : list of string - tensors that are ternary
        weights           : integer - their weights
        last              : object - the numbers of the last step
        before            : Comparison or null - before training, compared with the original
        after             : Comparison or null - after training, compared with the original
        special_tokens    : string - special tokens in front of each window
        device            : string - where it ran
    """),
    "train": _keys("""
        model              : string - the trained model
        checkpoint         : string - the state, for --resume
        log                : string - a line of JSON for each step
        picture            : string - the loss as a picture
        steps              : integer - steps taken
        loss               : number [nats per token] - mean loss of the last steps
        loss_of_steps      : integer - number of steps in `loss`
        tokens_per_second  : number [tokens/s] - median speed
        peak_bytes         : integer [bytes] - peak memory
        weight_bytes       : integer [bytes] - memory of the compressed weights
        dense_weight_bytes : integer [bytes] - what they would take uncompressed
        state_bytes        : integer [bytes] - memory of the optimizer states
        special_tokens     : string - special tokens in front of each window
        device             : string - where it ran
        processes          : integer - processes
        seconds            : number [s] - wall time
    """),
    "demo": _keys("""
        paths           : list of string - folders written
        weights         : integer - elements of all tensors
        weight_bytes    : integer [bytes] - weight files of the built-in checkpoint
        bound_ratio     : number - entropy bound of lossless coding, as a share of the tensors
        compressed      : list of DemoStep - lossless, then rounded
        identical_files : integer - restored files that equal the original byte for byte
        convention      : Convention - how the text was predicted
        blocks          : string - samples of the standard errors, such as documents
        scores          : list of Score - original, lossless, rounded
        versions        : map of string - versions of neuzip, Python, torch, transformers
        seconds         : number [s] - wall time
    """),
}
