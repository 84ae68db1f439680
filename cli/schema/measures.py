"""Keys of measurements: losses, divergences, scores of tasks, reports."""

from __future__ import annotations

from collections.abc import Mapping

from neuzip.cli.schema.table import Keys, keys_of

CONVENTION = keys_of("""
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
    "Estimate": keys_of("""
        value          : number or null - the measured value; null if it is not finite
        standard_error : number or null - its standard error, in the same unit; null if there are too few
        | samples
    """),
    "Comparison": keys_of("""
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
    "Divergence": keys_of("""
        mean   : Estimate [nats per token] - mean
        median : number or null [nats per token] - median
        p999   : number or null [nats per token] - 99.9th percentile
        max    : number or null [nats per token] - maximum
    """),
    "EvaluatedModel": keys_of("""
        path              : string - the checkpoint
        dtype             : string - dtype it computed in
        weight_bytes      : integer [bytes] - memory of the weights
        tokens_per_second : number [tokens/s] - speed of the model without its head; one pass, so without a
        | standard error
        formed            : string or null - why all logits had to be materialised
        kv_bits           : integer or null - bits of the KV cache; null if it was not quantised, or if
        | keys, values or layers differ
        kv_layers         : list of (KVLayerBits or null) or null - bits of each layer's keys and values,
        | null for a layer without any; null if the KV cache was not quantised
        kv_form           : string or null - form of the KV cache: rotated or a4.8
        query_bits        : integer or null - bits of the queries; null if they were not quantised
        attention_bits    : list of (integer or null) or null - bits of each layer's attention, null for
        | full precision
        attention_calls   : map of integer - number of attention calls by how they ran
        activations       : Activations or null - how activations of ternary weights were quantised
    """),
    "KVLayerBits": keys_of("""
        keys   : integer - bits of a number in the keys
        values : integer - bits of a number in the values
    """),
    "KVCalibration": keys_of("""
        max_kld     : number [nats per token] - the limit
        kld         : Estimate [nats per token] - mean KL divergence on the calibration text, from the model
        | with its own KV cache
        stored_bits : number [bits] - bits of a number on average, scales included
        trials      : list of (number or null) [nats per token] - KL divergence of each choice that was
        | measured, the last one taken; null if not finite
        text        : string - the calibration text
        tokens      : integer - tokens predicted
        window      : integer [tokens] - length of a window
        seconds     : number [s] - wall time
        plan        : string or null - plan file that --kv-plan wrote
    """),
    "Activations": keys_of("""
        mode  : string - b1.58, a4.8, a4.8-fp4 or none
        sites : object - modes of sites that differ from `mode`
    """),
    "ConventionScores": CONVENTION
    | keys_of("""
        blocks         : string - samples of the standard errors, such as documents
        before         : Score or null - the original, with --original
        after          : Score - SRC
    """),
    "Score": keys_of("""
        nll              : Estimate [nats per token] - negative log-likelihood
        token_perplexity : Estimate - perplexity per token
        word_perplexity  : Estimate or null - perplexity per word
        byte_perplexity  : Estimate or null - perplexity per byte
        bits_per_byte    : Estimate or null [bits] - bits per byte
        difference       : LossDifference or null - SRC minus the original, paired
    """),
    "LossDifference": keys_of("""
        nll          : Estimate [nats per token] - difference of the negative log-likelihoods
        identical    : boolean - whether all losses are the same to the last bit
        nll_per_word : Estimate or null [nats per word] - the same per word
        nll_per_byte : Estimate or null [nats per byte] - the same per byte
    """),
    "PeakMemory": keys_of("""
        bytes : integer or null [bytes] - peak memory
        of    : string - which memory this is, in words
    """),
    "Sparsity": keys_of("""
        sites      : map of number - share of zero activations of each site, 0 to 1
        overall    : number - share over all sites, weighted by their number of weights
        active     : integer - weights that are multiplied per token
        parameters : integer - weights of these layers
        tokens     : integer - tokens counted
    """),
    "Tasks": keys_of("""
        scores  : list of TaskScore - each metric of each task
        harness : string - version of lm-evaluation-harness
    """),
    "TaskScore": keys_of("""
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
    "Report": keys_of("""
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
    "ReportRow": keys_of("""
        name   : string - what was measured
        after  : Estimate or null - SRC
        before : Estimate or null - the original
        note   : string - how it was measured
        unit   : string - unit
        change : Estimate or null [percent] - change in percent of the original, paired
    """),
    "Distribution": keys_of("""
        tokens     : integer - tokens
        zero       : integer - tokens with a KL divergence of exactly 0
        below      : integer - tokens below 1e-12
        counts     : list of integer - tokens from 1e-12 to 100 nats, five bins per power of ten
        above      : integer - tokens above 100
        not_finite : integer - tokens that are infinite or not a number
        quantiles  : map of number [nats] - quantiles
        largest    : number or null [nats] - maximum
    """),
    "ReportTensor": keys_of("""
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
    "SweepPoint": keys_of("""
        scheme          : string - the scheme or yardstick
        kind            : string - lossless, rounded, quantized or yardstick
        bits_per_weight : number [bits] - bits per weight
        nbytes          : integer [bytes] - size of the weight files
        kld             : Estimate [nats per token] - mean KL divergence
        perplexity      : Estimate - perplexity per token
    """),
    "Convention": CONVENTION,
}

COMMANDS: Mapping[str, Keys] = {
    "eval": keys_of("""
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
        kv_calibration : KVCalibration or null - how the bits of the KV cache were chosen, with
        | --kv-bits auto:KLD
        sparsity    : Sparsity or null - zero activations, with --sparsity
        tasks       : Tasks or null - scores of lm-evaluation-harness, with --tasks
        page        : string or null - page that --report wrote
        report      : Report or null - the report as --report FILE.json writes it; `push --evaluation` also
        | accepts this JSON output
    """),
}
