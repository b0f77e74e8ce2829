"""Declares the names in the table ``stats``: usual severity, meaning, and remedy of each.

docs/reference/stats.md is generated from this table, and a test compares it with the names that the code uses. The
severity declared here is the usual one; a reader may report a row with another one.
"""

from __future__ import annotations

from typing import NamedTuple


class DeclaredStat(NamedTuple):
    """A name of ``stats`` with its usual severity, its meaning, and what a user can do about it."""

    name: str
    severity: str
    meaning: str
    remedy: str = "none needed"


_COLLECT_AGAIN = "record again; this recording stays incomplete"
_NO_TIME = "record again with a newer profiler and driver; figures leave these events out"
_SEE_EXAMPLE = "see the example: record again when its cause is removed"
_REWRITE = "the writer of the file has a defect; the rest of the file is used"
_TRUNCATED = "the recording was killed or the disk was full: record again, or use what is there"

RECORDER_STATEMENTS = frozenset(
    {"read.nsys_problem", "read.profiler_problem", "read.xplane_problem", "read.xla_copy"}
)
"""Stats that state what a recorder lost or left out: reasons for missing GPU activity."""

DECLARED_STATS = (
    # Runs and folders
    DeclaredStat(
        "job.other_runs",
        "info",
        "folders next to the traces that contain further traces; not read",
        "open the run by its own path",
    ),
    DeclaredStat(
        "store.not_summarized",
        "info",
        "analyses whose results are not stored, because the run is too large",
        "run the verb on the stored run: it computes the answer from the tables",
    ),
    DeclaredStat(
        "job.missing_ranks",
        "info",
        "ranks of the world size without a trace",
        "collect them too, if the question is about all ranks",
    ),
    DeclaredStat(
        "job.unreadable_capture",
        "data_loss",
        "traces of the capture of device graphs that cannot be read",
        "record the capture again",
    ),
    DeclaredStat(
        "job.unreadable_file",
        "error",
        "files of the run that cannot be read",
        "see the example; salvage or remove the file",
    ),
    DeclaredStat(
        "job.duplicate_rank_files",
        "data_loss",
        "further files of the same kind for one rank, not read",
        "leave one file per rank and kind in the folder, or open each folder separately",
    ),
    DeclaredStat(
        "job.profilers_joined",
        "info",
        "events by which recordings of one process by two profilers were put on one clock, with the fit",
    ),
    DeclaredStat(
        "job.profilers_not_joined",
        "data_loss",
        "recordings by a second profiler that do not fit the first one; not used",
        "record both at the same time in one process, or leave one of the files in the folder",
    ),
    DeclaredStat(
        "job.outside_other_recording",
        "info",
        "events of a joined recording outside of the time of the other one; not used",
        "open the recording separately",
    ),
    DeclaredStat(
        "job.skipped_file",
        "info",
        "files in the folder that are not part of the run",
        "open the file separately",
    ),
    DeclaredStat(
        "job.joined_parts",
        "info",
        "traces of one rank that follow each other in time, read as one (SGLang's stages)",
    ),
    DeclaredStat(
        "job.other_process",
        "info",
        "traces of processes that are not ranks (tokenizer, scheduler, frontend); not analyzed with the ranks",
        "open the file separately",
    ),
    DeclaredStat(
        "job.ranks_inferred",
        "info",
        "traces that state no rank; it is inferred from the numbers in which their paths differ",
        "if the ranks are others, specify them with --rank-pattern",
    ),
    DeclaredStat(
        "job.ranks_numbered",
        "info",
        "devices of profiles of several hosts, numbered as ranks by file name and device",
        "name the files in the order of their hosts",
    ),
    DeclaredStat(
        "job.converted_file_used",
        "info",
        "a converted file was read instead of the file that the observer wrote",
    ),
    DeclaredStat(
        "job.salvaged_file_used", "data_loss", "a salvaged file was read instead of the damaged original"
    ),
    DeclaredStat(
        "job.workload_card", "data_loss", "the workload card cannot be read", "correct the YAML of the card"
    ),
    DeclaredStat("job.run_json", "info", "run.json cannot be read", "the traces are used without it"),
    DeclaredStat(
        "job.unfinished_recording",
        "data_loss",
        "a collector was killed and left unfinished files in a hidden folder",
        "etloom salvage RUN/",
    ),
    DeclaredStat(
        "job.ended_early", "info", "the job ended before the requested steps", "record earlier steps"
    ),
    DeclaredStat(
        "job.end_unknown", "info", "the collector was killed, so the exit status of the job is unknown"
    ),
    DeclaredStat("job.failed", "info", "the recorded command failed", "see the exit status in the example"),
    DeclaredStat(
        "job.truncated_recording",
        "data_loss",
        "a rank was killed in a recording window; traces written at its end are lost",
        "use --with et or shorter recording windows",
    ),
    DeclaredStat(
        "job.not_linked",
        "info",
        "tables stay on disk, not linked, because the verb only scans them",
        "etloom link RUN",
    ),
    DeclaredStat(
        "job.rank_mismatch",
        "error",
        "the rank in a file differs from the rank under which it was opened",
        "pass {rank: file} to etloom.open",
    ),
    DeclaredStat(
        "job.world_size_mismatch",
        "error",
        "ranks state different world sizes, or a rank beyond the world size",
        "do not mix files of several jobs",
    ),
    DeclaredStat("job.ranks_beyond_group", "data_loss", "process groups with members outside the world size"),
    DeclaredStat(
        "job.no_common_time",
        "error",
        "according to their clocks, the ranks never all recorded at the same time",
        "do not mix recordings of different times",
    ),
    # Linking
    DeclaredStat(
        "link.ranks_differ", "error", "the linked files belong to different ranks", "link files of one rank"
    ),
    DeclaredStat(
        "link.processes_differ",
        "error",
        "the execution trace and the profile come from different processes",
        "link files of one run",
    ),
    DeclaredStat(
        "link.no_operators",
        "info",
        "the profile contains GPU activity only, so no operator can be linked",
        "profile with activity CPU",
    ),
    DeclaredStat("link.name_disagreements", "info", "ids agree but names differ; not linked"),
    DeclaredStat("link.repeated_ids", "info", "ids that occur twice on one side; not used"),
    DeclaredStat(
        "link.rejected_rf_id",
        "info",
        "the record function ids of the files are not of one run; operators are paired by name and order instead",
    ),
    DeclaredStat(
        "link.rejected_external_id",
        "info",
        "the external ids of the files are not of one run; operators are paired by name and order instead",
    ),
    DeclaredStat(
        "link.rejected_op_id",
        "info",
        "the op ids of the files are not of one run; operators are paired by name and order instead",
    ),
    DeclaredStat(
        "link.identical_iterations",
        "info",
        "several iterations of the profile match equally well; the middle one is linked",
        "--iterations all",
    ),
    DeclaredStat(
        "link.missing_threads",
        "info",
        "operators on threads that the profile lacks",
        "profile_all_threads in torch.profiler",
    ),
    DeclaredStat("link.outside_recording", "info", "operators before or after the profile's time"),
    DeclaredStat("link.unlinked_operators", "info", "operators without a counterpart in the profile"),
    DeclaredStat(
        "link.process_group_nodes", "info", "process-group records, which only the execution trace contains"
    ),
    DeclaredStat(
        "link.launch_missing",
        "info",
        "GPU activity without a launch call in the trace",
        "see the reasons in the following names",
    ),
    DeclaredStat(
        "link.launches_by_arrow",
        "info",
        "GPU activity without an id of a call, linked by the file's arrows (flow events)",
    ),
    DeclaredStat(
        "link.launches_by_order",
        "info",
        "GPU activity without ids and arrows, linked by order: one thread launched as many activities for one stream",
    ),
    DeclaredStat(
        "link.launched_before_recording", "info", "GPU activity launched before the recording began"
    ),
    DeclaredStat(
        "link.launched_after_recording",
        "info",
        "GPU activity whose correlation is above the last recorded call",
    ),
    DeclaredStat(
        "link.launch_not_recorded",
        "info",
        "GPU activity whose launch call the profiler dropped",
        _COLLECT_AGAIN,
    ),
    DeclaredStat("link.without_correlation", "info", "GPU activity without a correlation id"),
    DeclaredStat(
        "link.no_calls_recorded",
        "info",
        "the recording contains no runtime calls",
        "profile with activity CPU",
    ),
    DeclaredStat(
        "link.shared_correlations",
        "error",
        "GPU activity whose correlation id is used by calls of several processes, as in merged files",
        "analyze one process per trace",
    ),
    DeclaredStat(
        "link.repeated_correlations",
        "info",
        "correlation ids shared by several calls; the latest before the activity is used",
    ),
    DeclaredStat(
        "link.activity_after_recording",
        "info",
        "launch calls whose GPU activity ran after the recording ended",
    ),
    DeclaredStat("link.launches_without_activity", "info", "launch calls without GPU activity in the trace"),
    DeclaredStat("link.launch_without_operator", "info", "launch calls outside any operator"),
    DeclaredStat("link.graph_launches", "info", "launch calls that start several activities (CUDA graphs)"),
    DeclaredStat(
        "link.graph_activity_attributed",
        "info",
        "activities of replayed device graphs that have the operator of their captured call",
    ),
    DeclaredStat(
        "link.graph_activity_without_capture",
        "info",
        "activities of replayed device graphs without a recorded capture; no operator",
        "record the capture, and put its trace into a folder capture_traces next to this one",
    ),
    DeclaredStat(
        "link.graph_activity_refused",
        "info",
        "activities of replayed device graphs that no capture matches; no operator",
        "record the capture of this model and batch size",
    ),
    DeclaredStat(
        "link.graph_activity_undecided",
        "info",
        "activities of replayed device graphs that captures of other shapes match equally; no operator",
        "record only the captures of the batch sizes in use",
    ),
    DeclaredStat(
        "link.graph_activity_ambiguous",
        "info",
        "activities of replayed device graphs whose place in the capture is uncertain; no operator",
    ),
    DeclaredStat(
        "link.activity_outside_nodes", "info", "GPU activity outside the linked operators, not part of an ET+"
    ),
    DeclaredStat("link.comms_without_event", "info", "collectives that only the execution trace contains"),
    DeclaredStat(
        "link.syncs_without_record", "info", "synchronizations whose event-record call is not in the trace"
    ),
    DeclaredStat(
        "link.syncs_without_activity", "info", "synchronizing calls that waited for no visible GPU activity"
    ),
    DeclaredStat(
        "link.backward_without_forward",
        "info",
        "backward operators without a forward operator of that sequence number",
    ),
    DeclaredStat("link.asynchronous_events", "info", "events that end on another thread; not nested"),
    DeclaredStat(
        "link.overlapping_events",
        "info",
        "events that overlap others of their thread without nesting; treated as enclosing those, or as ending them",
    ),
    DeclaredStat(
        "link.clamped_events",
        "info",
        "events that outlast their parent by rounding; nested as if they ended with it",
    ),
    DeclaredStat(
        "link.unclosed_events",
        "info",
        "events without an end; nested as if they lasted until the end of the recording",
    ),
    DeclaredStat(
        "link.steps_of_several_processes",
        "error",
        "several processes annotate steps of the same number",
        "analyze one process per trace",
    ),
    DeclaredStat(
        "link.repeated_steps",
        "error",
        "a process annotates a step number several times, as in recordings of several profiler sessions",
        "select a part: etloom analyze ... --time, or open the files separately",
    ),
    DeclaredStat(
        "link.several_devices", "info", "the rank used several devices; it counts as busy if any of them is"
    ),
    # Reading: any format
    DeclaredStat("read.truncated", "data_loss", "the file ends early; everything before is read", _TRUNCATED),
    DeclaredStat(
        "read.corrupt_compression",
        "data_loss",
        "the compressed data is damaged; everything before is read",
        _TRUNCATED,
    ),
    DeclaredStat("read.trailing_bytes", "data_loss", "bytes after the end of the document", _REWRITE),
    DeclaredStat(
        "read.missing_gpu_events",
        "error",
        "a truncated trace without GPU events although its device recorded some",
        _TRUNCATED,
    ),
    DeclaredStat(
        "read.memory_on_other_clock",
        "data_loss",
        "totals of a memory snapshot that are left out: the events of the rank are not on its clock",
        "open the snapshot alone",
    ),
    DeclaredStat("read.events", "info", "events in the file"),
    DeclaredStat("read.nodes", "info", "operators in the file"),
    DeclaredStat("read.entries", "info", "entries in the file"),
    DeclaredStat("read.header", "data_loss", "a damaged member of the file's header", _REWRITE),
    DeclaredStat(
        "read.repeated_id",
        "data_loss",
        "rows of a table with the id of an earlier row; they are left out",
        _REWRITE,
    ),
    DeclaredStat(
        "read.missing_reference",
        "data_loss",
        "ids of rows that do not exist; they are null now, or their row is left out",
        _REWRITE,
    ),
    DeclaredStat(
        "read.parent_cycle",
        "data_loss",
        "rows that depend on themselves through their parents; their parent is now null",
        _REWRITE,
    ),
    DeclaredStat(
        "read.wrong_type",
        "data_loss",
        "values whose type or format does not fit their column; now null",
        _REWRITE,
    ),
    DeclaredStat(
        "read.out_of_range", "data_loss", "numbers beyond the range of their column; now null", _REWRITE
    ),
    DeclaredStat(
        "read.missing_operators",
        "data_loss",
        "operators that the recorder numbered but the file lacks, if they are most: the file is a sample, so what "
        "looks idle may have been work; findings on the rank have low confidence",
        "open the complete file",
    ),
    DeclaredStat(
        "read.open_annotation",
        "info",
        "annotations that ended after the profiler had stopped and the last other event had ended; cut to that time",
    ),
    DeclaredStat(
        "read.unknown_time",
        "data_loss",
        "events and samples whose time the recorder wrote as zero, because it did not know it; left out",
        _NO_TIME,
    ),
    DeclaredStat(
        "read.outside_recording",
        "data_loss",
        "events and samples whose time lies far outside of the recording; left out",
        _NO_TIME,
    ),
    DeclaredStat(
        "read.impossible_duration",
        "data_loss",
        "durations that cannot be: activities that contain later ones of their stream, copies faster than any link, "
        "ends long after the recording; now null",
        _NO_TIME,
    ),
    DeclaredStat(
        "read.absent_value",
        "info",
        "required values that the file lacks; replaced by the number in the example",
    ),
    DeclaredStat(
        "read.incomplete_rows",
        "data_loss",
        "rows without a value that every row must have; left out",
        _REWRITE,
    ),
    DeclaredStat(
        "read.invalid_characters", "info", "texts with lone surrogates, which are not characters; now U+FFFD"
    ),
    DeclaredStat(
        "read.invalid_meta", "data_loss", "facts of the header of another type or range; left out", _REWRITE
    ),
    DeclaredStat(
        "read.invalid_event", "data_loss", "entries that are not valid JSON objects; skipped", _REWRITE
    ),
    DeclaredStat(
        "read.no_phase",
        "data_loss",
        "events without a phase (ph); skipped. The empty entry with which TSL and NCCL end a list counts as info",
        _REWRITE,
    ),
    DeclaredStat(
        "read.xla_copy",
        "data_loss",
        "device events of the JSON file that XLA's profiler (JAX, TensorFlow) writes next to its .xplane.pb",
        "open the .xplane.pb, which holds all of the profile",
    ),
    DeclaredStat(
        "read.no_time", "data_loss", "entries without a valid time; skipped or without time", _REWRITE
    ),
    DeclaredStat("read.no_id", "data_loss", "nodes without an id; skipped", _REWRITE),
    DeclaredStat(
        "read.no_rank",
        "data_loss",
        "collectives without a valid rank in a table of all ranks of Ascend; left out",
        _REWRITE,
    ),
    DeclaredStat("read.empty_metadata", "info", "metadata events without content; skipped"),
    DeclaredStat("read.metadata_events", "info", "metadata events, which name processes and threads"),
    DeclaredStat("read.other_metadata", "info", "metadata events that no table holds"),
    DeclaredStat(
        "read.no_counter", "data_loss", "counter events without a readable sample; skipped", _REWRITE
    ),
    DeclaredStat(
        "read.invalid_counter", "data_loss", "counter values or times that are not numbers; skipped", _REWRITE
    ),
    DeclaredStat("read.counter_events", "info", "counter events, each with one or several samples"),
    DeclaredStat("read.negative_duration", "data_loss", "negative durations; now null or 0", _REWRITE),
    DeclaredStat(
        "read.negative_dur",
        "data_loss",
        "events that ended before they began; the duration is null",
        _REWRITE,
    ),
    DeclaredStat("read.invalid_duration", "data_loss", "durations that are not numbers; now null", _REWRITE),
    DeclaredStat("read.no_duration", "info", "complete events without a duration"),
    DeclaredStat("read.unexpected_type", "info", "values of an unexpected type, kept as text"),
    DeclaredStat("read.invalid_tensor", "info", "tensor descriptions that could not be parsed; kept as text"),
    DeclaredStat(
        "read.invalid_json", "data_loss", "values that are not JSON, or nested too deeply; now null", _REWRITE
    ),
    DeclaredStat("read.nonfinite", "info", "NaN or infinity, which JSON cannot represent, kept as text"),
    DeclaredStat("read.invalid_escape", "info", "backslash escapes unknown to JSON, kept as they are"),
    DeclaredStat("read.long_text", "info", "texts of more than a megabyte"),
    DeclaredStat("read.no_flow_id", "data_loss", "arrow ends without an id; now null", _REWRITE),
    DeclaredStat("read.text_flow_id", "info", "arrow ids that are not integers; numbered"),
    DeclaredStat(
        "read.unstored_args",
        "data_loss",
        "arguments of counter, flow or metadata events that no column holds",
    ),
    DeclaredStat("read.paired_ranges", "info", "begin and end events (B, E) joined to complete events"),
    DeclaredStat(
        "read.step_operators",
        "info",
        "step annotations of the category of operators (torch 1.8 and 1.9), read as user_annotation",
    ),
    DeclaredStat(
        "read.steps_joined",
        "info",
        "steps placed one after another, because the file has times within steps only",
    ),
    DeclaredStat("read.end_without_begin", "data_loss", "range ends without a begin; skipped", _REWRITE),
    DeclaredStat("read.begin_without_end", "data_loss", "range begins without an end", _REWRITE),
    DeclaredStat(
        "read.base_ignored",
        "info",
        "times are absolute although the file states a base; the base is not added",
    ),
    DeclaredStat(
        "read.invalid_base", "data_loss", "the stated time base is not a number; not added", _REWRITE
    ),
    DeclaredStat("read.unknown_schema", "info", "an unknown schema version, read as the nearest known one"),
    DeclaredStat(
        "read.duplicate_node_id", "error", "node ids that occur twice; references mean the first", _REWRITE
    ),
    DeclaredStat(
        "read.dangling_dependency",
        "data_loss",
        "dependencies on nodes that the file does not contain",
        _REWRITE,
    ),
    DeclaredStat("read.missing_parent", "info", "nodes whose parent the file does not contain"),
    DeclaredStat(
        "read.repaired_parent",
        "info",
        "recorded parents that contradict the order of operators; replaced by nesting",
    ),
    DeclaredStat("read.damaged_node", "data_loss", "nodes without an id; skipped", _REWRITE),
    DeclaredStat(
        "read.completed_ranks",
        "info",
        "rank lists abbreviated by the recorder, completed from start and size",
    ),
    DeclaredStat("read.unknown_collective", "info", "collectives of unknown names, which are used unchanged"),
    DeclaredStat(
        "read.rank_within_unknown_group",
        "data_loss",
        "group-relative ranks of groups whose members are unknown",
    ),
    DeclaredStat("read.unreadable_values", "info", "attribute values that cannot be decoded, kept as text"),
    DeclaredStat("read.skipped_entries", "info", "entries that are not communication; skipped"),
    DeclaredStat(
        "read.damaged_entry", "data_loss", "entries without the required members; skipped", _REWRITE
    ),
    DeclaredStat(
        "read.unnumbered_call",
        "data_loss",
        "calls without a sequence number; not compared across ranks",
        "record the dumps with torch 2.4 or newer",
    ),
    # The native observer's file
    DeclaredStat("read.unfinished_file", "info", "the recording process was killed, or is still writing"),
    DeclaredStat(
        "read.open_operators", "info", "operators that had not ended when the file or recording window ended"
    ),
    DeclaredStat("read.overwritten_operators", "info", "operators overwritten in the ring buffer"),
    DeclaredStat(
        "read.truncated_chunks",
        "data_loss",
        "the file ends inside a chunk or before its last chunk",
        _TRUNCATED,
    ),
    DeclaredStat("read.damaged_chunk", "data_loss", "chunks with a wrong checksum; skipped", _COLLECT_AGAIN),
    DeclaredStat(
        "read.damaged_record",
        "data_loss",
        "invalid records; the rest of the chunk is skipped",
        _COLLECT_AGAIN,
    ),
    DeclaredStat(
        "read.damaged_arguments", "data_loss", "argument lists without a complete definition", _COLLECT_AGAIN
    ),
    DeclaredStat(
        "read.unnamed_operator", "data_loss", "operators whose name definition is lost", _COLLECT_AGAIN
    ),
    DeclaredStat(
        "read.observer_no_space",
        "data_loss",
        "operators lost to the size limit or a full disk",
        "raise --max-size, or use --ring",
    ),
    DeclaredStat(
        "read.observer_no_dictionary", "data_loss", "names or argument lists beyond the dictionary's capacity"
    ),
    DeclaredStat("read.observer_arguments_omitted", "data_loss", "argument lists too long for a record"),
    DeclaredStat("read.observer_lists_truncated", "data_loss", "lists truncated to 4,096 items"),
    DeclaredStat("read.observer_failed", "data_loss", "argument lists that torch did not provide"),
    DeclaredStat("read.observer_reentrant", "data_loss", "operators caused by the observer itself; skipped"),
    DeclaredStat("read.observer_raised", "info", "operators that ended with an exception"),
    DeclaredStat("read.observer_ended_elsewhere", "info", "scopes that ended on another thread"),
    DeclaredStat(
        "read.observer_ended_outside",
        "info",
        "operators that ended in a recording window but began before it; the end is not recorded",
    ),
    DeclaredStat("read.observer_unsized", "info", "tensors without plain sizes: nested or symbolic"),
    DeclaredStat(
        "read.observer_thread_exiting",
        "data_loss",
        "operators on a thread that was already exiting; not recorded",
    ),
    DeclaredStat("read.observer_overwritten", "info", "chunks of the ring buffer that were overwritten"),
    DeclaredStat(
        "read.observer_stuck", "error", "threads that hung inside the observer", "report it with the example"
    ),
    # Memory snapshots
    DeclaredStat("read.unknown_action", "data_loss", "allocator actions of an unknown kind; skipped"),
    DeclaredStat(
        "read.without_time",
        "info",
        "entries without time_us, in their order",
        "PyTorch 2.2 and later write it",
    ),
    DeclaredStat(
        "read.totals_unknown",
        "data_loss",
        "the history does not match the segments, so totals are null",
        "record from the start of the process",
    ),
    DeclaredStat("read.unpaired_annotation", "data_loss", "annotations with only a begin or only an end"),
    # Metrics
    DeclaredStat("read.metrics_invalid_line", "data_loss", "lines that cannot be parsed; skipped", _REWRITE),
    DeclaredStat(
        "read.metrics_invalid_time",
        "data_loss",
        "rows without a valid time; skipped",
        "specify --time-column and --unit",
    ),
    DeclaredStat("read.metrics_invalid_number", "data_loss", "cells that are not numbers; skipped"),
    DeclaredStat("read.metrics_assumed_utc", "info", "dates without a time zone, taken as UTC"),
    DeclaredStat("read.metrics_without_time", "info", "durations without a point in time (vLLM)"),
    # Nsight Systems
    DeclaredStat(
        "read.pftrace_clock",
        "info",
        "packets of a clock that no snapshot relates to the others; their times are taken as they are",
    ),
    DeclaredStat(
        "read.pftrace_damaged",
        "data_loss",
        "messages of a Perfetto trace that contain something else than fields; read up to there",
        _REWRITE,
    ),
    DeclaredStat("read.pftrace_description", "info", "packets that describe the recording; not read"),
    DeclaredStat("read.pftrace_field", "info", "fields of events and annotations that are not read"),
    DeclaredStat(
        "read.pftrace_lost",
        "data_loss",
        "places at which the recorder of a Perfetto trace lost packets",
        "record again with larger buffers",
    ),
    DeclaredStat("read.pftrace_no_name", "data_loss", "names that the file does not contain", _REWRITE),
    DeclaredStat(
        "read.pftrace_no_state",
        "data_loss",
        "events whose names and defaults were lost; skipped",
        "record again with larger buffers",
    ),
    DeclaredStat(
        "read.pftrace_no_type", "info", "events that are neither a slice, an instant nor a counter; skipped"
    ),
    DeclaredStat(
        "read.pftrace_other_packet",
        "info",
        "packets other than track events (ftrace, heap graphs, CPU samples); not read",
    ),
    DeclaredStat(
        "read.xplane_damaged",
        "data_loss",
        "protobuf messages that contain something else than fields; read up to there",
        _REWRITE,
    ),
    DeclaredStat(
        "read.xplane_enclosing_ops",
        "info",
        "operations of a TPU core that contain others (while, conditional); their time is that of the others",
    ),
    DeclaredStat("read.xplane_idle_device", "info", "devices of the profile without an event"),
    DeclaredStat(
        "read.xplane_no_name", "data_loss", "events whose name the profile does not contain", _REWRITE
    ),
    DeclaredStat("read.xplane_no_time", "info", "events that state only how often they occurred; skipped"),
    DeclaredStat(
        "read.xplane_plane_not_read",
        "info",
        "events of planes that are neither a device nor the host; skipped",
    ),
    DeclaredStat(
        "read.xplane_problem",
        "data_loss",
        "errors and warnings of the profiler about itself",
        "see the example; raise the limits of the profiler, or record fewer steps",
    ),
    DeclaredStat(
        "read.profiler_problem",
        "data_loss",
        "warnings, errors and counts of dropped records that the profiler wrote about itself",
        _SEE_EXAMPLE,
    ),
    DeclaredStat(
        "read.nsys_problem",
        "data_loss",
        "warnings and errors of Nsight about its own recording (DIAGNOSTIC_EVENT)",
        _SEE_EXAMPLE,
    ),
    DeclaredStat(
        "read.nccl_lost",
        "data_loss",
        "collectives that the NCCL Inspector did not write: holes in sequence numbers, and the losses it states",
        "record with a larger ring, or accept that sums are of the collectives that were written",
    ),
    DeclaredStat(
        "read.missing_comma",
        "info",
        "commas that NCCL 2.28.9 leaves out in the JSON of its RAS when a rank is missing; added",
    ),
    DeclaredStat(
        "read.mpi_other_process",
        "data_loss",
        "events of processes without a call of MPI, which are not ranks, in a trace of MPI calls",
        "record each rank in a file of its own",
    ),
    DeclaredStat(
        "read.mpi_part",
        "data_loss",
        "collectives of MPI that state one rank's part, of a communicator of unknown size or in uneven parts; without "
        "a size",
        "record all ranks in one file",
    ),
    DeclaredStat(
        "read.ascend_not_read",
        "info",
        "rows of an Ascend database that have no table here: hardware metrics, memory, call stacks",
    ),
    DeclaredStat(
        "read.ascend_tasks",
        "info",
        "tasks of an NPU that wait or notify; events of the category npu_task, which no sum includes",
    ),
    DeclaredStat(
        "read.summary_differs",
        "error",
        "sums that the recorder wrote (Ascend's Overlap Analysis) differ from those of its events",
        "report the file: kinds of tasks are read wrongly, or the recorder lost some",
    ),
    DeclaredStat(
        "read.nccl_unknown_device",
        "data_loss",
        "calls of a process with several GPUs in communicators that do not state which GPU they are of; left out",
        "record one process per GPU",
    ),
    DeclaredStat(
        "read.nccl_no_start",
        "info",
        "collectives of the NCCL Inspector without a start; they have a duration only",
        "record with NCCL_INSPECTOR_DUMP_VERBOSE=1",
    ),
    DeclaredStat(
        "read.nccl_unfinished", "info", "begins without an end in the JSON of NCCL's profiler plugin; skipped"
    ),
    DeclaredStat("read.nsys_no_time", "data_loss", "events without a valid start; skipped", _REWRITE),
    DeclaredStat(
        "read.nsys_no_name", "data_loss", "events whose name is in neither text nor StringIds", _REWRITE
    ),
    DeclaredStat(
        "read.nsys_no_process", "data_loss", "events that do not state their process; skipped", _REWRITE
    ),
    DeclaredStat(
        "read.nsys_inferred_process", "info", "events that do not state their process; it is inferred"
    ),
    DeclaredStat("read.nsys_no_text", "info", "NVTX ranges without a text"),
    DeclaredStat(
        "read.nsys_idle_process",
        "data_loss",
        "events of processes without GPU activity; skipped",
        "read(..., all_processes=True)",
    ),
    DeclaredStat("read.nsys_table_not_read", "info", "rows of tables that etloom does not use"),
    DeclaredStat(
        "read.damaged_table",
        "data_loss",
        "tables of a database that cannot be read completely",
        "export or record again",
    ),
    DeclaredStat(
        "read.nsys_inferred_rank",
        "info",
        "ranks inferred from ascending process ids",
        "pass {rank: file} or set RANK in the job",
    ),
    DeclaredStat(
        "read.nsys_open_range", "info", "NVTX ranges that were never closed; their duration is null"
    ),
    DeclaredStat("read.nsys_nvtx_kind", "info", "NVTX records that are neither ranges nor marks"),
    DeclaredStat("read.nsys_payload", "data_loss", "NVTX payloads that their schema does not describe"),
    DeclaredStat(
        "read.nsys_graph_launch",
        "info",
        "CUDA graphs traced as one activity",
        "nsys profile --cuda-graph-trace=node",
    ),
    DeclaredStat(
        "read.nsys_device_of_sync", "info", "synchronizations attributed to the device of their context"
    ),
    DeclaredStat("read.rocprof_no_time", "data_loss", "events without a valid start; skipped", _REWRITE),
    DeclaredStat("read.rocprof_no_name", "data_loss", "events whose name the file does not state", _REWRITE),
    DeclaredStat(
        "read.rocprof_no_process",
        "data_loss",
        "GPU activities of no process that made calls; skipped",
        _REWRITE,
    ),
    DeclaredStat(
        "read.rocprof_idle_process",
        "data_loss",
        "events of processes without GPU activity; skipped",
        "read(..., all_processes=True)",
    ),
    DeclaredStat(
        "read.rocprof_not_read", "info", "rows of a file of ROCm's profilers that etloom does not use"
    ),
    DeclaredStat(
        "read.rocprof_inferred_rank",
        "info",
        "ranks inferred from ascending process ids",
        "pass {rank: file} or set RANK in the job",
    ),
    DeclaredStat("read.nsys_failed_call", "info", "runtime calls that returned an error"),
    # Replays
    DeclaredStat(
        "replay.stopped",
        "data_loss",
        "the replay was interrupted, so it is incomplete",
        "run it again without a limit",
    ),
    DeclaredStat(
        "replay.trial_run",
        "info",
        "the times are those of the first run of each operator",
        "allow more time",
    ),
)
"""All names, grouped by origin."""
