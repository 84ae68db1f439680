"""Keys of the commands that read and write checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from neuzip.cli.schema.table import Keys, keys_of

OBJECTS: Mapping[str, Keys] = {
    "Loss": keys_of("""
        max_relative : number - largest |restored - original| / |original| of a non-zero weight
        rms_relative : number - root mean square of |restored - original| / |original|
        relative_l2  : number or null - |restored - original| / |original| of the whole tensor in the L2
        | norm; ternary and quantized tensors only
    """),
    "CompressedTensor": keys_of("""
        file           : string - weight file
        name           : string - name of the tensor
        dtype          : string - dtype as safetensors writes it
        shape          : list of integer - shape
        scheme         : string - how the tensor is stored: raw, lossless, `k=3` (3 mantissa bits), ternary,
        | quantized (with the bits of a code), alias (same bytes as an earlier tensor), or as in the base
        original_bytes : integer [bytes] - size before
        stored_bytes   : integer or null [bytes] - size after, without headers; predicted in a dry run, null
        | if unknown
        loss           : Loss or null - what rounding did; null if nothing was lost, and in a dry run
        note           : string - why this scheme was chosen, if the choice may surprise; else empty
    """),
    "Component": keys_of("""
        name           : string - folder of the component, `.` for the top
        schemes        : map of integer - number of tensors by scheme
        original_bytes : integer [bytes] - size of its tensors before
        stored_bytes   : integer or null [bytes] - size after, without headers; predicted in a dry run, null
        | if unknown
    """),
    "RestoredTensor": keys_of("""
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
    "InspectedTensor": keys_of("""
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
        bound_bytes        : integer or null [bytes] - entropy bound: of lossless coding with exponents coded,
        | or of the codes of a ternary or quantized tensor
        codes              : Codes or null - codes of a quantized tensor
        base               : string or null - the tensor of the base that a delta needs
    """),
    "Codes": keys_of("""
        code_bits      : integer [bits] - bits that hold every code
        step           : number - step of the grid, without factors
        row_factors    : boolean - whether each row has a factor
        column_factors : boolean - whether each column has a factor
        entropy        : number [bits per weight] - entropy of the codes
        stored_bits    : number [bits per weight] - size in the file, with factors
    """),
    "Entropies": keys_of("""
        sign     : number [bits per weight] - entropy of the sign
        exponent : number [bits per weight] - entropy of the exponent
        mantissa : number [bits per weight] - entropy of the mantissa; an upper bound beyond 10 bits
        joint    : number or null [bits per weight] - entropy of whole weights of up to 16 bits
    """),
    "InspectedTotals": keys_of("""
        tensors        : integer - number of tensors
        original_bytes : integer [bytes] - size of the tensors uncompressed, without headers
        stored_bytes   : integer [bytes] - size of the tensors compressed, without headers
        bound_bytes    : integer or null [bytes] - sum of the bounds, if every tensor has one
    """),
    "Rate": keys_of("""
        bits_per_weight : number [bits] - 8 * stored_bytes / weights
        stored_bytes    : integer [bytes] - size at this rate: of the weight files, or with --tensor of the
        | tensors
        ratio           : number or null - stored_bytes as a share of the original size
        step            : number or null - step of the grid, divided by the root mean square of a tensor's
        | weights; null if no step gives this size
        relative_l2     : number or null - relative error of the quantised matrices in the L2 norm
    """),
    "Histogram": keys_of("""
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
    "TensorDifference": keys_of("""
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
    "Side": keys_of("""
        file  : string - weight file
        name  : string - name of the tensor
        dtype : string - dtype
        shape : list of integer - shape
    """),
    "ExportedTensor": keys_of("""
        name        : string - name of the tensor
        shape       : list of integer - shape
        dtype       : string - dtype in the source
        kind        : string - ternary or dense
        group       : integer or null - weights that share a scale
        scale_error : number - largest relative difference between a scale and the one that the engine
        | computes with
        packing     : string or null - name of its type in the engine
    """),
    "HubFile": keys_of("""
        path  : string - path in the repository
        bytes : integer [bytes] - size
    """),
    "Stream": keys_of("""
        commit         : string - commit of the source on the Hub
        most_of_source : integer [bytes] - largest size of source weight files on the disk at any time
    """),
    "Pushed": keys_of("""
        url       : string - page of the repository
        commit    : string - commit that was made
        deleted   : list of string - files of the older checkpoint that were removed
        files     : list of string - files that were uploaded
        was_there : boolean - whether all files were there already
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
    "compress": keys_of("""
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
        components          : list of Component - each folder with weights, of a pipeline; empty if all
        | weights are in one folder
        target              : Target or null - result of --max-kld, --max-ppl-increase or --target-size
        attention           : Calibration or null - the choice of --attention
        base                : string or null - path of the base of a delta
        base_name           : string or null - name of the base, as the delta records it
        stream              : Stream or null - what --stream did
        pushed              : Pushed or null - what --push-to did
    """),
    "decompress": keys_of(_RESTORED),
    "apply": keys_of(_RESTORED),
    "verify": keys_of("""
        src       : string - what was verified
        original  : string or null - what it was compared with
        base      : string or null - base of a delta
        intact    : boolean - whether every checksum is right; the command fails otherwise
        files     : integer - weight files
        device    : string - where tensors were decoded
        identical : boolean or null - whether every tensor equals the original; null without --original
        tensors   : list of RestoredTensor - each tensor
    """),
    "inspect": keys_of("""
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
        rates               : list of Rate - predictions of quantised forms of a plain checkpoint, from the
        | weights alone; empty for a compressed checkpoint
        histograms          : list of Histogram - one for each dtype
        records             : object - what neuzip recorded in config.json
        plot                : string or null - picture that was written
    """),
    "diff": keys_of("""
        a              : string - first checkpoint
        b              : string - second checkpoint
        identical      : boolean - whether all tensors are identical; if not, the exit code is 1
        compared_bytes : integer [bytes] - bytes compared
        totals         : map of integer - number of tensors, in total and by status
        tensors        : list of TensorDifference - each tensor
    """),
    "export": keys_of("""
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
    "push": keys_of("""
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
    "pull": keys_of("""
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
}
