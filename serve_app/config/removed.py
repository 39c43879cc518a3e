"""Fields that the configuration had once, and what users write instead."""

from __future__ import annotations

REMOVED = {
    "max_load_s": "a request waits 120 seconds for its model",
    "downloads.share": "each node downloads for itself, or all share one `downloads.folder`",
    "models.deployment": "`serve` has Ray Serve's options",
    "models.version": "give each version an `id` of its own",
    "models.weight": "give each version an `id` of its own, and let clients choose",
    "models.engine.allow_oversubscription": "each thread needs a core, so lower `threads`",
    "models.engine.checkpoint_ram_mib": "checkpoints get a sixteenth of the memory beside the weights",
    "models.engine.max_wait_s": "`max_first_token_s` bounds the wait",
    "models.engine.n_checkpoints": "each slot has three checkpoints",
    "models.engine.pin_cores": "a replica with whole cores keeps to its own",
    "models.engine.slot_folder_max_mib": "all files in `slot_folder` take 4096 MiB at most",
    "ingress.anonymous_admin": "give operators API keys with `admin: true`",
    "ingress.deployment": "`ingress.serve` has Ray Serve's options",
    "ingress.max_open_bodies": "it is an eighth of `ingress.serve.max_ongoing_requests`",
    "ingress.max_open_bodies_mib": "the bodies that are being read take 64 MiB at most",
    "ingress.max_responses_mib": "the number and the memory of kept responses are fixed",
    "ingress.max_responses_mib_per_key": "the number and the memory of kept responses are fixed",
    "ingress.max_responses_per_key": "the number and the memory of kept responses are fixed",
    "ingress.min_body_rate": "a body must bring 500 bytes a second",
    "ingress.verbose": "a request says `verbose: true`",
    "ingress.batch.max_batches": "a key may have 100 batches that have not ended",
    "ingress.batch.max_concurrency": "as many lines run at once as the engines have places for",
    "ingress.batch.max_file_mib": "a file may have 200 MiB",
    "ingress.batch.max_files": "a key may have 1000 files",
    "ingress.batch.max_lines": "a file may have 200000 lines",
    "ingress.batch.max_total_mib": "the files of a key may take 4096 MiB",
}
"""The sentence that helps, by the field's path without the numbers of list entries."""
