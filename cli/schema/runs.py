"""Keys of the commands that run, train and change models."""

from __future__ import annotations

from collections.abc import Mapping

from neuzip.cli.schema.table import Keys, keys_of
from neuzip.runtime.residencies import RESIDENCIES, in_words

OBJECTS: Mapping[str, Keys] = {
    "SpeedRow": keys_of(f"""
        residency                 : string - in-memory weight format: {in_words(RESIDENCIES)}
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
        kv_bits                   : integer or null - bits of the KV cache; null if it was not quantised, or
        | if keys, values or layers differ
        kv_layers                 : list of (KVLayerBits or null) or null - bits of each layer's keys and
        | values, null for a layer without any; null if the KV cache was not quantised
        cache_bytes               : integer [bytes] - memory of the KV cache
        attention                 : string or null - how the KV cache was read
        attention_bits            : list of (integer or null) or null - bits of each layer's attention, null
        | for full precision
        attention_calls           : map of integer - number of attention calls by how they ran
        activations               : Activations or null - how activations of ternary weights were quantised
        compiled                  : boolean - whether steps were compiled
        decode_spread             : number - (slowest - fastest) / median of the decode times
        host_bytes                : integer [bytes] - experts in pinned host memory
    """),
    "SweepRow": keys_of("""
        schema                  : integer - version of the row, which the files of --output have too
        scheme                  : string - the scheme or yardstick
        kind                    : string - lossless, rounded, quantized or yardstick
        bytes                   : integer [bytes] - weight files after; computed for a yardstick
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
        memory_bytes            : integer or null [bytes] - memory of the weights; null for a yardstick
        peak_bytes              : integer or null [bytes] - peak memory
        load_seconds            : number or null [s] - time to load; null for a yardstick
        decode_bytes_per_second : number or null [bytes/s] - speed of decompression; null for a yardstick
        tokens_per_second       : number or null [tokens/s] - tokens fed; null for a yardstick
        depends_on              : object - settings that must be equal before you compare rows
    """),
    "SweepSaving": keys_of("""
        yardstick      : string - the yardstick
        bits           : number [bits] - its bits per weight
        kld            : number [nats per token] - its mean KL divergence
        quantized_bits : number or null [bits] - bits per weight of quantised weights with this KL divergence;
        | interpolated between two rows, null outside of them
        quantized_kld  : number or null [nats per token] - KL divergence of quantised weights with these bits;
        | interpolated likewise
        saved          : number or null - 1 - quantized_bits / bits
    """),
    "SweepFailure": keys_of("""
        scheme : string - the scheme
        reason : string - why there is no row
    """),
    "LayerImportance": keys_of("""
        number                      : integer - number of the layer
        parameters                  : integer - its parameters
        block_influence             : Estimate - 1 - cosine of what goes in and what comes out
        angular_distance            : Estimate [of 180 degrees] - angle between them at the last token
        angular_distance_all_tokens : Estimate [of 180 degrees] - the same at all tokens
        gradient_norm               : Estimate or null - gradient norm of its parameters
        without                     : Comparison or null - the model without it; null if not finite
    """),
    "LayerUse": keys_of("""
        layer   : integer - number of the layer
        name    : string - module of its experts
        tokens  : list of integer - tokens that chose each expert
        weights : list of number or null - sum of the routing weights of each expert; null if not seen
    """),
    "Distances": keys_of("""
        mean           : list of list of number - angular distances: entry [n - 1][l] is from layer l to
        | layer l + n
        standard_error : list of list of (number or null) - their standard errors
    """),
    "Removal": keys_of("""
        choice     : string - greedy, block or angular
        layers     : list of integer - layers to drop
        order      : list of integer - the same layers in the order in which they were chosen
        klds       : list of number [nats per token] - mean KL divergence after each choice
        parameters : integer - parameters of the layers to drop
        comparison : Comparison - the model without them
    """),
    "Pruned": keys_of("""
        dst          : string - what was written
        dropped      : list of integer - layers that were dropped
        kept         : list of integer - layers that are left
        source_bytes : integer [bytes] - weights before
        bytes        : integer [bytes] - weights after
        warnings     : list of string - warnings
    """),
    "DemoStep": keys_of("""
        dst                 : string - what was written
        stored_weight_bytes : integer [bytes] - weight files after
        ratio               : number - stored_weight_bytes / weight_bytes
        bits_per_weight     : number [bits] - 8 * stored_weight_bytes / weights
    """),
    "Recipe": keys_of("""
        quantizer : string - how weights are rounded
        group     : integer or string or null - weights of a row that share a scale; row for all, null for
        | the tensor
    """),
    "Gpu": keys_of("""
        name               : string - its name
        compute_capability : string - such as 9.0
        memory_bytes       : integer [bytes] - its memory
    """),
    "Finding": keys_of("""
        topic  : string - part of the report: packages, engines, folders, results or GPU
        name   : string - what was looked at, such as a package, an engine or an operation of a device
        status : string - ok; note for what is not there or slower than it could be; problem for what will not
        | work
        text   : string - a version, or in one line what works or why not
        hint   : string or null - what to do about it
    """),
    "LaunchTable": keys_of("""
        operation          : string - the operation, such as packed_linear
        compute_capability : string - that of the GPUs, such as 9.0
        architecture       : string - folder of the table, such as sm90
        is_own             : boolean - false if the table of another compute capability serves the GPUs
        card               : string or null - GPU on which the table was measured
        commit             : string or null - commit with which it was measured
        date               : string or null - when
    """),
}

COMMANDS: Mapping[str, Keys] = {
    "doctor": keys_of("""
        healthy  : boolean - whether there is no problem; the exit code is 1 if there is one
        findings : list of Finding - what was looked at
    """),
    "env": keys_of("""
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
        launch_tables : list of LaunchTable - the tables of launch parameters in use; empty without a GPU
        variables    : map of boolean - environment variables that matter, and whether each is set
    """),
    "generate": keys_of("""
        prompt               : string - the prompt
        text                 : string - what was generated
        tokens               : list of integer - its tokens
        finish_reason        : string - length if the limit of new tokens ended the text, else stop
        prompt_tokens        : integer - tokens of the prompt
        load_seconds         : number [s] - time to load the model
        seconds              : number [s] - time to generate
        first_token_seconds  : number [s] - time to the first token
        capture_seconds      : number [s] - time to capture the CUDA graph, after the first token
        tokens_per_second    : number or null [tokens/s] - speed after the first token and the capture
        peak_bytes           : integer or null [bytes] - peak memory
        host_bytes           : integer [bytes] - experts in pinned host memory
        residency            : string - in-memory weight format
        activations          : Activations or null - how activations of ternary weights were quantised
        kv_bits              : integer or null - bits of the KV cache; null if it was not quantised, or if
        | keys, values or layers differ
        kv_layers            : list of (KVLayerBits or null) or null - bits of each layer's keys and values,
        | null for a layer without any; null if the KV cache was not quantised
        kv_calibration       : KVCalibration or null - how the bits of the KV cache were chosen, with
        | --kv-bits auto:KLD
        kv_bytes             : integer or null [bytes] - memory of the quantised KV cache
        attention            : string or null - how the KV cache was read
        attention_bits       : list of (integer or null) or null - bits of each layer's attention, null for
        | full precision
        attention_calls      : map of integer - number of attention calls by how they ran
        device               : string - where the model ran
        graphed              : boolean - whether steps ran as a CUDA graph
        not_graphed          : string or null - why steps did not run as a CUDA graph
    """),
    "bench": keys_of("""
        src           : string - the model
        prompt_tokens : integer - tokens of the prompt
        new_tokens    : integer - tokens generated
        rounds        : integer - runs of which medians are taken
        compiled      : boolean - whether steps were compiled
        expert_memory : integer or null [bytes] - experts on the GPU at most
        kv_calibration : KVCalibration or null - how the bits of the KV cache were chosen, with
        | --kv-bits auto:KLD
        rows          : list of SpeedRow - each in-memory format and batch size
        dtype         : string - dtype the model computed in
        device        : string - where it ran
        versions      : map of string - versions of neuzip, Python, torch, transformers
    """),
    "sweep": keys_of("""
        src        : string - the model
        text       : string - the text
        convention : string - how the text was cut into windows
        device     : string - where the model ran
        calibration : string or null - text that calibrated quantised weights; null without any
        front      : list of string - schemes that no other beats in both size and KL divergence
        resumed    : integer - schemes that an earlier run had measured
        rows       : list of SweepRow - each scheme and yardstick
        savings    : list of SweepSaving - quantised weights compared with each yardstick
        failed     : list of SweepFailure - schemes without results
        output     : string or null - folder of results
    """),
    "layers": keys_of("""
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
    "experts": keys_of("""
        src            : string - the model
        text           : string - the text
        tokens         : integer - tokens the model was run on
        layers         : list of LayerUse - each layer with experts
        window         : integer [tokens] - length of a window
        windows        : integer - number of windows
        special_tokens : string - special tokens in front of each window
        device         : string - where the model ran
        dtype          : string - dtype it computed in
        seconds        : number [s] - wall time
        versions       : map of string - versions of neuzip, Python, torch, transformers
        output         : string or null - file of the counts that was written
        plot           : string or null - picture that was written
    """),
    "ternarize": keys_of("""
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
    "recover": keys_of("""
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
    "train": keys_of("""
        model              : string - the trained model
        checkpoint         : string - the state, for --resume
        log                : string - a line of JSON for each step
        picture            : string - the loss as a picture
        steps              : integer - steps taken
        loss               : number [nats per token] - mean loss of the last steps
        loss_of_steps      : integer - number of steps in `loss`
        eval_loss          : number or null [nats per token] - mean loss of `eval_text` after training
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
    "demo": keys_of("""
        paths           : list of string - folders written
        weights         : integer - elements of all tensors
        weight_bytes    : integer [bytes] - weight files of the built-in checkpoint
        bound_ratio     : number - entropy bound of lossless coding, as a share of the tensors
        compressed      : list of DemoStep - lossless, then quantized
        identical_files : integer - restored files that equal the original byte for byte
        convention      : Convention - how the text was predicted
        blocks          : string - samples of the standard errors, such as documents
        scores          : list of Score - original, lossless, quantized
        versions        : map of string - versions of neuzip, Python, torch, transformers
        seconds         : number [s] - wall time
    """),
}
