"""Phrases that the `transcript` task makes its rounds of."""

from __future__ import annotations

AREAS = (
    "billing", "search", "inventory", "shipping", "payroll", "catalog", "messaging", "analytics", "checkout",
    "support", "telemetry", "calendar", "library", "ticketing", "auction", "recipe", "fleet", "donation", "archive",
    "survey", "loyalty", "subscription",
)  # fmt: skip
COMPONENTS = (
    "parser", "importer", "exporter", "scheduler", "indexer", "gateway", "dashboard", "validator", "notifier",
    "reconciler", "crawler", "uploader", "sampler", "worker", "renderer", "formatter", "migrator", "watcher",
    "throttler", "aggregator",
)  # fmt: skip

# Paths and commands are made of words that do not follow from the subject, so that they cannot be guessed.
ROOTS = ("src", "lib", "app", "core", "pkg", "modules")
FOLDERS = (
    "amber", "basalt", "cedar", "delta", "ember", "fjord", "granite", "harbor", "indigo", "juniper", "kestrel",
    "lagoon", "maple", "nimbus", "opal", "pebble", "quartz", "raven", "saffron", "tundra", "umber", "violet", "willow",
    "zephyr",
)  # fmt: skip
STEMS = (
    "anchor", "beacon", "bridge", "cable", "chain", "cursor", "engine", "filter", "funnel", "hinge", "kernel",
    "ladder", "lever", "mirror", "needle", "pivot", "pulley", "ratchet", "relay", "signal", "socket", "spindle",
    "turbine", "valve",
)  # fmt: skip
TAILS = ("pool", "table", "steps", "rules", "state", "store", "tasks", "types")
ENDINGS = ("py", "ts", "go", "rs")

COMMANDS = (
    "pytest -k {folder}_{stem} --seed {number}",
    "make bench-{folder} TARGET={stem} RUNS={number}",
    "npm run check -- --suite {folder}-{stem} --limit {number}",
    "cargo bench --bench {folder}_{stem} -- {number}",
    "go test ./{folder}/{stem} -timeout {number}s",
    "python -m {folder}.{stem} --rows {number}",
    "docker compose run {folder} {stem} --samples {number}",
)

METRICS = (
    "p95 latency in ms",
    "peak memory in MB",
    "row count",
    "cache hit count",
    "bundle size in KB",
    "warm-up time in ms",
    "replayed event count",
    "request count",
)

DECISIONS = {
    "storage engine": {
        "SQLite": "it needs no server",
        "PostgreSQL": "we want real transactions",
        "DuckDB": "most queries scan whole columns",
        "LMDB": "reads have to be very cheap",
    },
    "HTTP client": {
        "httpx": "it speaks HTTP/2",
        "aiohttp": "everything around it is asynchronous already",
        "requests": "everybody on the team knows it",
        "urllib3": "it brings no further dependencies",
    },
    "message queue": {
        "RabbitMQ": "messages need flexible routing",
        "Kafka": "old events must be replayed now and then",
        "NATS": "it is small and quick to set up",
        "Celery": "the jobs are plain functions anyway",
    },
    "data format": {
        "MessagePack": "the payloads stay small",
        "Protobuf": "the schema is checked on both sides",
        "Avro": "schemas will change over time",
        "Parquet": "the files are read column by column",
    },
    "cache": {
        "Redis": "entries have to expire on their own",
        "Memcached": "plain keys and values are enough",
        "Varnish": "whole pages are asked for again and again",
        "Hazelcast": "several nodes have to share it",
    },
    "compression method": {
        "zstd": "it is the best trade between speed and size",
        "gzip": "every client can read it",
        "brotli": "the texts shrink the most with it",
        "snappy": "it hardly costs any time",
    },
    "job runner": {
        "Airflow": "the steps depend on one another",
        "Prefect": "failed steps can be started again alone",
        "Luigi": "it is there already",
        "Dagster": "the data sets are tracked with it",
    },
    "template engine": {
        "Jinja": "designers can edit its files",
        "Mako": "it is faster on long pages",
        "Handlebars": "the browser can use the same files",
        "Mustache": "templates should hold no logic",
    },
}
"""What is decided, what it can be, and why one would take it. No choice is contained in another of its group."""

SETTINGS = (
    "port", "timeout in ms", "batch size", "cache limit", "payload limit in KB", "buffer size", "poll interval in ms",
    "rate limit per minute",
)  # fmt: skip

OPENINGS = (
    "Next is the {subject}. Can you find its code and measure it?",
    "Please look at the {subject} now; people say that it has become slow.",
    "Could you take the {subject}? I want to see a measurement before we change anything.",
    "The {subject} is on the list for today. Where does it live, and how does it behave?",
    "Let us turn to the {subject} and see what state it is in.",
)
LOCATED = (
    "The {subject} is implemented in {path}.",
    "I searched the repository: the code of the {subject} is in {path}.",
    "Found it: the {subject} lives in {path}.",
    "The file of the {subject} turns out to be {path}.",
)
RUN = (
    "I measure the {subject} with `{command}`.",
    "To check the {subject} I run `{command}`.",
    "For the {subject} I am running `{command}` now.",
    "The check of the {subject} is `{command}`, which I start now.",
)
OUTPUTS = (
    "{small} passed, 0 failed\n{subject}: {metric}: {number}",
    "collecting ... done\n{subject} | {metric} | {number}\nfinished in {small} s",
    "[info] {subject} ready\n[info] {metric} = {number}\n[info] {small} warnings",
    "report for {subject}\n  {metric}: {number}\n  exit code: 0",
)
DECIDED = (
    "As the {topic} of the {subject} I chose {winner} over {loser}, because {reason}.",
    "Decision for the {subject}: the {topic} will be {winner} and not {loser}, since {reason}.",
    "I also looked at {loser}, but the {topic} of the {subject} is going to be {winner}: {reason}.",
    "For the {subject} we take {winner} as the {topic} instead of {loser}; {reason}.",
)
PROPOSED = (
    "I would set the {setting} of the {subject} to {wrong}.",
    "My proposal for the {setting} of the {subject} is {wrong}.",
    "Shall I put the {setting} of the {subject} at {wrong}?",
    "And I changed the {setting} of the {subject} to {wrong}.",
)
CORRECTIONS = (
    "No, use {right}, not {wrong}.",
    "No, the {setting} of the {subject} has to be {right}, not {wrong}.",
    "That is wrong: the {subject} needs {right} as its {setting}, not {wrong}.",
    "Please change the {setting} of the {subject}: {right} instead of {wrong}.",
)
AGREED = (
    "Understood, it is corrected and saved.",
    "Thank you, I have changed it.",
    "Right, fixed. The tests still pass.",
    "Done, and I noted it in the changelog.",
)
SMALL_TALK = (
    ("Good. I am getting a coffee, back in a minute.", "Enjoy it. I keep the terminal open."),
    ("Nice work so far.", "Thanks. There is not much left for this morning."),
    ("Did the build go through, by the way?", "Yes, all green since the last push."),
    ("My connection was gone for a moment, go on.", "No problem, nothing was lost here."),
    ("How long have we been at this?", "For a good while, but the list is getting shorter."),
)
