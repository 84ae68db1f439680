"""Keys of what `compress` reaches a target by: plans, layers to drop, attention precision."""

from __future__ import annotations

from collections.abc import Mapping

from neuzip.cli.schema.table import Keys, keys_of

OBJECTS: Mapping[str, Keys] = {
    "Target": keys_of("""
        option           : string - the option: --bits, --max-kld, --max-ppl-increase or --target-size
        asked            : string - its value as given
        limit            : number - the value as a number: nats per token, or bytes for --bits and
        | --target-size
        met              : boolean or null - whether the result meets the target; null in a dry run
        scheme           : string - quantized or rounded
        calibration      : string or null - the text that quantised weights were fitted to
        calibration_tokens : integer or null - its tokens
        sensitivity      : string - how sensitivities were found: measured, fisher or weights
        text             : string or null - the text they were measured on
        special_tokens   : string - special tokens in front of each window of the text
        plan             : string or null - file of the plan (TOML); null in a dry run
        mean_step        : number or null - mean step of quantised weights
        delivered        : Comparison or null - the result compared with the original
        predicted_kld    : number or null [nats per token] - mean KL divergence that the plan predicts
        schemes          : map of integer or null - number of tensors of each scheme
        estimated_groups : integer or null - groups of tensors whose sensitivity was estimated from the
        | weights alone
        nearest_tensors  : integer or null - quantised tensors that are rounded to nearest because the
        | calibration text says nothing of their inputs; 0 with --calibration none
        experts          : list of ExpertsOfUse or null - experts of a mixture by how often they are chosen
        trials           : list of Trial or null - plans that were tried; the last one was taken
        dropped_layers   : list of integer - layers that were dropped
        drops            : Drops or null - predictions for --drop-layers
        passed_over      : Trial or null - a plan with more or fewer layers that was tried but not taken
        pays_from        : number or null [nats per token] - predicted smallest limit at which dropping a
        | layer makes the result smaller
    """),
    "Trial": keys_of("""
        predicted_kld : number or null [nats per token] - predicted mean KL divergence, if it was predicted
        bytes         : integer [bytes] - size of the weight files; predicted for trials of quantised weights
        | with a quality target
        comparison    : Comparison or null - compared with the original; null without a text or if not finite
        mean_step     : number or null - mean step of quantised weights
    """),
    "ExpertsOfUse": keys_of("""
        use             : string - hot, usual, cold or unused
        experts         : integer - experts of this class in all layers
        token_share     : number - share of the choices of all routers that fell on them
        bits_per_weight : number [bits] - predicted stored bits per weight
    """),
    "Drops": keys_of("""
        singles  : list of Drop - each layer left out alone
        steps    : list of Drop - first no dropped layer, then one more in each step
        rejected : Drop or null - the next step, not taken because it was predicted to gain nothing
        refused  : list of string - why some layers were not considered
    """),
    "Drop": keys_of("""
        layers     : list of integer - layers left out
        bytes      : integer [bytes] - size of their tensors, uncompressed
        comparison : Comparison or null - the model without them compared with the whole one
        predicted  : number or null - predicted result of a plan without these layers: bytes, or nats per
        | token for --target-size
    """),
    "Calibration": keys_of("""
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
    "AttentionLayer": keys_of("""
        number  : integer - number of the layer
        forms   : list of AttentionForm - attention at each precision that was measured
        refused : string or null - why the attention of this layer cannot be quantised
        bits    : integer or null - the choice; null for full precision
    """),
    "AttentionForm": keys_of("""
        bits      : integer - bits of queries and keys
        closeness : Closeness - output compared with exact attention
        kld       : Estimate or null [nats per token] - mean KL divergence with this layer alone quantised
    """),
    "Closeness": keys_of("""
        mean        : Similarity - means over windows
        worst       : Similarity - the worst window of each number
        score       : number - mean of cosine * (1 - relative_l1)
        deviation   : number or null - standard deviation of the score over windows
        worst_score : number - the lowest score of a window
    """),
    "Similarity": keys_of("""
        cosine      : number - cosine similarity
        relative_l1 : number - sum |o - o'| / sum |o|
        rmse        : number - root mean square of o - o'
    """),
}

COMMANDS: Mapping[str, Keys] = {
    "patch-attention": {
        **keys_of("""
            dry_run : boolean - whether nothing was written
            src     : string - the model
            dst     : string - what was written
        """),
        **OBJECTS["Calibration"],
        **keys_of("plot : string or null - picture that was written"),
    },
}
