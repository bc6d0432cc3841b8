"""Checks the rules of STYLE.md that ruff, mypy and import-linter cannot express.

Each failure message has the file, the line and the rule.
"""

import ast
import logging
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

from scripts import generate_docs
from scripts.reference import events
from tests.sim import mutants
from tests.tidy.sources import (
    PROJECT_ROOT,
    SourceFile,
    fail_if_any,
    hand_written_files,
    parse_source,
    product_sources,
    read_text,
    sources_of_tests,
    tracked_files,
)
from waltz_core.config import CONFIG_TYPES_BY_KIND

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 800
# Functions of tests that sleep because there is no condition to wait for.
PLAIN_WAITS = ("wait_before_retry", "wait_for_nothing")
# path -> why it may be longer
FILES_LONGER_ON_PURPOSE = {
    "waltz_core/config/declarations.py": "the table of all settings, mostly their descriptions",
    "waltz_core/local/local_cluster.py": "one class, mostly short methods for its processes",
    "waltz_core/ops/diagnosis.py": "all checks of the doctor, most of them a few lines long",
    "waltz_core/wire/messages.py": "the table of all messages, one dataclass each, no behavior",
}
FOLDER_FILES_MAX = 15
# Packages whose files are pure, except for shells. A shell is a file that uses one of
# SHELL_MODULES.
PURE_PACKAGES = ("replication", "wire", "storage", "cluster", "server")
SHELL_MODULES = ("asyncio", "threading", "socket", "subprocess", "multiprocessing", "kazoo")
# Unions that each machine defines, and that are always used with the name of their module.
NAMES_WITH_A_MODULE = ("Event", "Effect")
# A word in this number of class names must be in the glossary, unless every programmer knows it.
GLOSSARY_NAMES_MIN = 5
ORDINARY_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        admin appends cache callbacks check client cluster command config connection
        consumer copy data directory disk done end entry error failed failure fetch field file
        find found index info keeper kind limits link local log mark memory message metric
        metrics mismatch node not open opened option options partitions payload pending progress
        protocol read reader records replicas report request requests response result run send
        server session set shared source state storage store stored task to view waiting
        waltz write writer zoo
        """,
    )
)
# Methods that change their object and return a value.
CHANGES = {"acquire", "next", "pop", "popitem", "popleft", "remove", "send", "setdefault", "step"}
# third-party module -> the only files that may name it
LIBRARY_FILES = {
    # These files compute CRC-32 separately: the verifier of a disk shares no code with the writer.
    "crcmod": ("waltz_core/offline/layout.py",),
    "cryptography": ("waltz_core/encryption/envelopes.py", "waltz_core/encryption/keys.py"),
    "deltalake": ("waltz_core/tables/delta_table.py",),
    "fastavro": ("waltz_core/schemas/avro_codec.py",),
    "google": ("waltz_core/schemas/protobuf_codec.py",),
    "h11": ("waltz_core/transport/http_port.py",),
    "kazoo": (
        "waltz_core/cluster/zookeeper/zookeeper_session.py",
        "waltz_core/cluster/zookeeper/kazoo_connection.py",
    ),
    "nats": ("waltz_bench/compared/nats_peer.py",),
    "msgpack": (
        "waltz_core/client/model/serializers.py",
        "waltz_core/records/unpacking.py",
        "waltz_spark/rows.py",
    ),
    "prometheus_client": ("waltz_core/exported_metrics.py", "waltz_core/metrics.py"),
    "psutil": ("waltz_core/local/local_cluster.py", "waltz_bench/measuring.py"),
    "py4j": ("waltz_spark/session_errors.py",),
    "rich": ("waltz_core/cli/output.py", "waltz_core/cli/progress.py"),
    "sqlalchemy": ("waltz_core/client/api/sql.py", "waltz_bench/sql_view.py"),
    "starlette": (
        "waltz_core/daemon_pages.py",
        "waltz_core/gateway/console/console_routes.py",
        "waltz_core/gateway/console/static_pages.py",
        "waltz_core/gateway/http_json.py",
        "waltz_core/gateway/http_routes.py",
        "waltz_core/transport/http_port.py",
    ),
    "uvicorn": ("waltz_core/transport/http_port.py",),
}
# Spark and the core exchange pyarrow data, so waltz_spark may use pyarrow anywhere. In the core,
# only these files may use pyarrow: rows in batches, and the encoding and encryption of payloads.
ARROW_FILES = (
    "waltz_core/archive/objects.py",
    "waltz_core/archive/store.py",
    "waltz_core/encryption/envelopes.py",
    "waltz_core/records/arrow_buffers.py",
    "waltz_core/records/batches.py",
    "waltz_core/records/payload_types.py",
    "waltz_core/records/typed_values.py",
    "waltz_core/records/unpacking.py",
    "waltz_core/schemas/avro_schemas.py",
    "waltz_core/client/api/scanning.py",
    "waltz_core/client/model/compression.py",
    "waltz_core/cli/client/client_export.py",
    "waltz_core/cli/client/payload_columns.py",
    "waltz_core/tables/delta_columns.py",
    "waltz_core/tables/delta_table.py",
    "waltz_core/tables/followed_log.py",
    "waltz_core/tables/inferred_columns.py",
    "waltz_core/tables/parquet_table.py",
    "waltz_core/tables/row_changes.py",
)
DISK_FILES = ("waltz_core/storage/disk/file_system.py",)
# Methods of paths that a file must not use if it accesses the disk only through a `Disk`.
PATH_CALLS = (
    "glob",
    "is_dir",
    "is_file",
    "iterdir",
    "mkdir",
    "read_bytes",
    "read_text",
    "resolve",
    "rglob",
    "rmdir",
    "stat",
    "write_bytes",
    "write_text",
)
BANNED_WORDS_IN_NAMES = ("util", "utils", "manager", "handler", "helper", "helpers", "base", "misc")
BANNED_MODULES = ("pickle", "marshal", "shelve", "cloudpickle")
ISSUE_LINK = re.compile(r"#\d+|https?://")
PYTHON_FILE = re.compile(r"(?<![\w/.*-])((?:\w+/)*\w+\.py)\b")
# A page, with the number or the title of one of its sections if that is given; a comment may wrap.
PAGE = re.compile(
    r"(?<![\w*./:-])([\w*./:-]*\w\.md)\b(?:#(?P<anchor>[\w-]+))?`?"
    r"(?:\s+(?:#\s+)?(?P<number>\d+(?:\.\d+)*)\b|,\s+(?:#\s+)?\"(?P<title>\w[^\"\n]*)\")?"
)
LINK_TEXT = re.compile(r"\[[^\]\n]*\]\(")
DECISION = re.compile(r"\bdecisions?(?:[\s#]+|/)(\d{1,3})\b")
# page -> why it is in no checkout
PAGES_OF_USERS = {
    "build/chaos-report.md": "the report that `make chaos` writes",
    "build/sim-report.md": "the report that `make sim` writes",
    "build/report.md": "the report of a test, in its own directory",
}
# file -> why it is in no checkout
FILES_OF_OTHERS = {
    "job.py": "an application that a user submits to Spark",
    "stock.py": "an application that a user runs",
    "pyspark/daemon.py": "a part of PySpark",
}
TO_DO = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X])\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home/\w+|Users/\w+|tmp/\w+)/")


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the length of a function without its docstring."""
    assert function.end_lineno is not None
    line_count = function.end_lineno - function.lineno + 1
    return line_count - len((ast.get_docstring(function, clean=False) or "").splitlines())


def imported(node: ast.AST) -> list[str]:
    """Return the top-level names that a node imports."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module.split(".")[0]]
    return []


def calls(nodes: Iterable[ast.AST], *names: str) -> list[ast.Call]:
    """Return the calls of functions that are written like one of the names."""
    return [node for node in nodes if isinstance(node, ast.Call) and dotted(node.func) in names]


def dotted(node: ast.AST) -> str:
    """Return a dotted name such as `a.b.c`; for other expressions, only the attributes."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
    return ""


# --- Files


def test_every_file_has_a_docstring():
    silent = [
        s.path
        for s in (*product_sources(), *sources_of_tests())
        if s.text and not ast.get_docstring(s.tree)
    ]
    fail_if_any(silent, "the file has no docstring")


def test_files_are_at_most_800_lines_long():
    long = {s.path for s in product_sources() if s.text.count("\n") > FILE_LINES_MAX}
    fail_if_any(long - set(FILES_LONGER_ON_PURPOSE), f"over {FILE_LINES_MAX} lines")
    fail_if_any(set(FILES_LONGER_ON_PURPOSE) - long, "listed as long, but short")


def test_file_names_have_no_vague_words():
    vague = [
        s.path
        for s in (*product_sources(), *sources_of_tests())
        if set(Path(s.path).stem.removeprefix("test_").split("_")) & set(BANNED_WORDS_IN_NAMES)
    ]
    fail_if_any(vague, "a vague word in the name of a file")


def test_overviews_hold_prose_only():
    """Exceptions are the packages whose interface applications use."""
    public = {
        f"{name}/__init__.py"
        for name in (
            "waltz_core",
            "waltz_core/client",
            "waltz_core/config",
            "waltz_core/local",
            "waltz_spark",
        )
    }
    wrong = [
        s.path
        for s in product_sources()
        if s.path.endswith("__init__.py") and s.path not in public
        if len(s.tree.body) > 1
    ]
    fail_if_any(wrong, "an __init__.py with code")


def test_folders_are_small_and_have_an_overview():
    folders: dict[str, list[str]] = {}
    for source in product_sources():
        folder, _, name = source.path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    silent = [each for each, names in folders.items() if "__init__.py" not in names]
    fail_if_any(silent, "the folder has no __init__.py")
    full = [each for each, names in folders.items() if len(names) - 1 > FOLDER_FILES_MAX]
    fail_if_any(full, f"over {FOLDER_FILES_MAX} files")


def test_an_overview_mentions_each_file_of_its_folder():
    """The root packages are public. ARCHITECTURE.md lists the files of their layers."""
    silent = []
    for product_source in product_sources():
        folder, _, name = product_source.path.rpartition("/")
        if folder in ("waltz_core", "waltz_spark"):
            continue
        stem = name.removesuffix(".py")
        text = ast.get_docstring(parse_source(f"{folder}/__init__.py").tree) or ""
        if stem not in ("__init__", "__main__") and not re.search(rf"\b{stem}\b", text):
            silent.append(product_source.path)
    fail_if_any(silent, "the folder's __init__.py does not mention it")


def test_files_mentioned_in_texts_exist():
    paths = [Path(name).parts for name in tracked_files() if name.endswith(".py")]
    endings = {"/".join(parts[start:]) for parts in paths for start in range(len(parts))}
    # Decisions also describe files of earlier versions.
    pages = [
        (name, read_text(name))
        for name in tracked_files()
        if name.endswith((".md", ".ipynb")) and not name.startswith("docs/decisions/")
    ]
    missing = [
        f"{name}: {path}"
        for name, text in (*pages, *((s.path, s.text) for s in product_sources()))
        for path in PYTHON_FILE.findall(text)
        if path not in FILES_OF_OTHERS and path not in endings
    ]
    fail_if_any(missing, "a text names a file that does not exist")


def test_pages_and_sections_mentioned_in_texts_exist():
    wrong = [
        f"{name}: {' '.join(match_.group().split())}"
        for name in hand_written_files()
        if ".md" in read_text(name)
        for match_ in PAGE.finditer(LINK_TEXT.sub("(", read_text(name)).replace('" / "', "/"))
        if not page_exists(name, match_)
    ]
    fail_if_any(wrong, "a text names a page or a section that does not exist")


def test_decisions_mentioned_in_texts_exist():
    decision_numbers = {
        int(path.name[:3]) for path in (PROJECT_ROOT / "docs" / "decisions").glob("[0-9]*.md")
    }
    missing = [
        f"{name}: {match_.group()}"
        for name in hand_written_files()
        if "decision" in read_text(name)
        for match_ in DECISION.finditer(read_text(name))
        if int(match_.group(1)) not in decision_numbers
    ]
    fail_if_any(missing, "a text names a decision that does not exist")


def page_exists(source: str, mention: re.Match[str]) -> bool:
    """Return whether a page exists, relative to the root or to the folder of the given file."""
    page = mention.group(1)
    if "://" in page or "*" in page or page in PAGES_OF_USERS:
        return True
    paths = [
        path
        for path in (PROJECT_ROOT / page, (PROJECT_ROOT / source).parent / page)
        if path.is_file()
    ]
    if not paths:
        return False
    titles = titles_of(paths[0])
    if anchor := mention["anchor"]:
        return anchor in map(anchor_of, titles)
    if number := mention["number"]:
        return any(re.match(rf"{re.escape(number)}[. ]", title) for title in titles)
    return mention["title"] is None or mention["title"] in titles


@cache
def titles_of(page: Path) -> tuple[str, ...]:
    """Return the titles of a page's sections."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return tuple(line.lstrip("#").strip() for line in lines if line.startswith("#"))


def anchor_of(title: str) -> str:
    """Return the anchor of a section."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def is_shell(source: SourceFile) -> bool:
    """Return whether a file uses a name that pure modules must not use."""
    names = {name for node in source.nodes for name in imported(node)}
    return bool(names & set(SHELL_MODULES))


# --- Names


def test_a_class_name_has_one_meaning():
    """Public names must be unique, because readers search for them in all files."""
    paths_by_name: dict[str, list[str]] = {}
    for source in product_sources():
        for node in source.tree.body:
            alias = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(alias, ast.Name) and ast.unparse(node.annotation) == "TypeAlias":
                paths_by_name.setdefault(alias.id, []).append(source.path)
            elif isinstance(node, ast.ClassDef):
                paths_by_name.setdefault(node.name, []).append(source.path)
    several = [
        f"{name}: {', '.join(paths)}"
        for name, paths in paths_by_name.items()
        if len(paths) > 1 and not name.startswith("_") and name not in NAMES_WITH_A_MODULE
    ]
    fail_if_any(several, "one name, several classes")


def test_a_module_name_has_one_meaning():
    paths_by_name: dict[str, list[str]] = {}
    for source in product_sources():
        if not source.path.endswith(("__init__.py", "__main__.py")):
            paths_by_name.setdefault(Path(source.path).stem, []).append(source.path)
    several = [
        f"{name}: {', '.join(paths)}" for name, paths in paths_by_name.items() if len(paths) > 1
    ]
    fail_if_any(several, "one name, several modules")


def test_the_glossary_has_the_frequent_words_of_names():
    count = Counter(
        word.lower()
        for source in product_sources()
        if source.path.startswith(("waltz_core/", "waltz_spark/"))
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
        for word in set(re.findall(r"[A-Z][a-z]+", node.name))
    )
    page = read_text("ARCHITECTURE.md")
    rows = re.findall(r"(?m)^\| (.*?) \|", page[: page.index("## The processes")])
    explained = {word for row in rows for word in re.findall(r"\w+", row.lower())}
    missing = {word for word, names in count.items() if names >= GLOSSARY_NAMES_MIN} - explained
    fail_if_any(missing - ORDINARY_WORDS, "no row in the glossary of ARCHITECTURE.md")
    fail_if_any(ORDINARY_WORDS - set(count), "listed as ordinary, but in no name")


# --- Functions


def test_functions_are_at_most_60_lines_long():
    long = [
        f"{s.path}:{node.lineno} {node.name}"
        for s in (*product_sources(), *sources_of_tests())
        for node in s.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if body_lines(node) > FUNCTION_LINES_MAX
    ]
    fail_if_any(long, f"over {FUNCTION_LINES_MAX} lines")


def test_the_code_uses_named_constants_instead_of_a_bare_minus_one_as_an_id():
    """`BEFORE_FIRST` and `NO_SESSION` have names."""
    bare = [
        f"{s.path}:{node.lineno}"
        for s in product_sources()
        for node in s.nodes
        if isinstance(node, ast.Call) and dotted(node.func) in ("TransactionId", "SessionId")
        if node.args
        and ast.unparse(node.args[0]) == "-1"
        and s.path != "waltz_core/records/record.py"
    ]
    fail_if_any(bare, "a bare -1; BEFORE_FIRST and NO_SESSION have names")


# --- Libraries


def test_each_third_party_library_has_one_interface():
    wrong = [
        f"{s.path}:{node.lineno} names {name}"
        for s in product_sources()
        for node in s.nodes
        for name in imported(node)
        if (name in LIBRARY_FILES and s.path not in LIBRARY_FILES[name])
        or (name == "pyarrow" and s.path.startswith("waltz_core/") and s.path not in ARROW_FILES)
    ]
    fail_if_any(wrong, "a library is named outside of its interface")


def test_every_pure_file_is_under_the_contract_of_pure_modules():
    """import-linter checks only the listed modules; this test checks the list."""
    settings = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [
        each
        for each in settings["tool"]["importlinter"]["contracts"]
        if each["name"].startswith("pure modules")
    ]
    listed = tuple(f"{name}." for name in contract["source_modules"])
    folders = tuple(f"waltz_core/{name}/" for name in PURE_PACKAGES)
    folders += tuple(f"waltz_sim/{name}/" for name in ("world", "cluster", "faults", "guarantees"))
    forgotten = [
        s.path
        for s in product_sources()
        if s.path.startswith(folders) and not s.path.endswith("__init__.py") and not is_shell(s)
        if s.path not in DISK_FILES
        if not (s.path.removesuffix(".py").replace("/", ".") + ".").startswith(listed)
    ]
    fail_if_any(forgotten, "add them to source_modules in pyproject.toml")


def test_files_are_reached_only_through_a_disk():
    wrong = [
        f"{s.path}:{node.lineno} {dotted(node.func)}"
        for s in product_sources()
        if s.path.startswith(
            ("waltz_core/storage/", "waltz_sim/world/", "waltz_sim/cluster/", "waltz_sim/faults/")
        )
        if s.path not in DISK_FILES and not is_shell(s)
        for node in s.nodes
        if isinstance(node, ast.Call)
        if dotted(node.func).split(".")[-1] in PATH_CALLS or dotted(node.func) == "open"
    ]
    wrong += [
        f"{s.path}:{node.lineno} names {name}"
        for s in product_sources()
        if s.path.startswith("waltz_core/storage/") and s.path not in DISK_FILES and not is_shell(s)
        for node in s.nodes
        for name in imported(node)
        if name in ("os", "fcntl", "io", "tempfile", "shutil")
    ]
    fail_if_any(wrong, "files are reached through `Disk`")


def test_nothing_is_pickled_or_evaluated():
    wrong = [
        f"{s.path}:{node.lineno} names {name}"
        for s in product_sources()
        for node in s.nodes
        for name in imported(node)
        if name in BANNED_MODULES
    ]
    wrong += [
        f"{s.path}:{c.lineno} evaluates"
        for s in product_sources()
        for c in calls(s.nodes, "eval", "exec")
    ]
    fail_if_any(wrong, "pickle, eval and their like")


def test_assertions_have_no_side_effects():
    """Python can be configured to skip assertions, and with them their effects."""
    wrong = [
        f"{s.path}:{child_node.lineno} does something: {ast.unparse(child_node)}"
        for s in product_sources()
        for node in s.nodes
        if isinstance(node, ast.Assert)
        for child_node in ast.walk(node)
        if isinstance(child_node, ast.NamedExpr | ast.Await | ast.Yield)
        or (
            isinstance(child_node, ast.Call)
            and ast.unparse(child_node.func).split(".")[-1] in CHANGES
        )
    ]
    fail_if_any(wrong, "assertions that have an effect")


def test_every_setting_is_read():
    """A setting that no code reads would have no effect."""
    read = {
        node.attr
        for s in product_sources()
        if s.path != "waltz_core/config/declarations.py"
        for node in s.nodes
        if isinstance(node, ast.Attribute)
    }
    dead = [
        f"{config_type.__name__}.{field.name}"
        for config_type in CONFIG_TYPES_BY_KIND.values()
        for field in fields(config_type)
        if field.name not in read
    ]
    fail_if_any(dead, "a setting that no file reads")


# --- Tests


def test_tests_sleep_only_between_checks_of_a_condition():
    wrong = []
    for source in sources_of_tests():
        paced = {
            id(call)
            for loop in source.nodes
            if isinstance(loop, ast.While) or getattr(loop, "name", "") in PLAIN_WAITS
            for call in calls(ast.walk(loop), "time.sleep", "asyncio.sleep")
        }
        wrong += [
            f"{source.path}:{call.lineno}"
            for call in calls(source.nodes, "time.sleep", "asyncio.sleep")
            if id(call) not in paced and ast.unparse(call.args[0]) != "0"
        ]
    fail_if_any(wrong, "a sleep outside of a `while` loop that checks a condition")


def test_skips_and_expected_failures_give_a_reason():
    wrong = []
    for source in sources_of_tests():
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("skip", "xfail", "skipif"):
                reasoned = [
                    call
                    for call in source.nodes
                    if isinstance(call, ast.Call) and call.func is node
                    if any(keyword.arg == "reason" for keyword in call.keywords)
                    or (node.attr == "skip" and call.args)
                ]
                if not reasoned:
                    wrong.append(f"{source.path}:{node.lineno}")
    fail_if_any(wrong, "skip and xfail need a reason")


def test_every_test_can_fail():
    """A test asserts, expects an exception, or calls a function in its file that does so."""
    idle = []
    for source in sources_of_tests():
        functions = [
            node
            for node in source.nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        refusing = {node.name for node in functions if can_fail_by_assertion(node)}
        idle += [
            f"{source.path}:{node.lineno} {node.name}"
            for node in functions
            if node.name.startswith("test_") and node.name not in refusing
            if not can_fail(node, refusing)
        ]
    fail_if_any(idle, "a test that cannot fail")


def can_fail_by_assertion(function: ast.AST) -> bool:
    """Return whether a function asserts, or expects an exception."""
    nodes = list(ast.walk(function))
    asserts = any(isinstance(node, ast.Assert) for node in nodes)
    return asserts or bool(calls(nodes, "pytest.raises"))


def can_fail(function: ast.AST, refusing: Collection[str]) -> bool:
    """Return whether a function contains a check that may fail."""
    asserting = {
        "fail_if_any",
        "raises",
        "suppress",
        "fail",
        "run_state_machine_as_test",
        *refusing,
    }
    nodes = list(ast.walk(function))
    called = {dotted(node.func).split(".")[-1] for node in nodes if isinstance(node, ast.Call)}
    has_assert = any(isinstance(node, ast.Assert | ast.Raise) for node in nodes)
    return has_assert or any(
        name in asserting or name.startswith(("assert_", "expect_", "check_")) for name in called
    )


# --- All files of the repository


def lines_with(pattern: re.Pattern[str], name: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that match a pattern, with their locations."""
    if pattern.search(read_text(name)):
        for number, line in enumerate(read_text(name).splitlines(), 1):
            if pattern.search(line):
                yield f"{name}:{number}", line


def test_every_todo_links_an_issue():
    open_ends = [
        place
        for name in hand_written_files()
        for place, line in lines_with(TO_DO, name)
        if not ISSUE_LINK.search(line)
    ]
    fail_if_any(open_ends, "an open task without a link to an issue")


def test_no_path_of_one_machine_is_named():
    found = [
        place
        for name in tracked_files()
        if name != "tests/tidy/test_tidy.py"
        for place, _ in lines_with(MACHINE_PATH, name)
    ]
    fail_if_any(found, "a path of one machine only")


def test_generated_samples_and_tables_are_current():
    fail_if_any(generate_docs.outdated_files(), "not current: run make docs")


def test_the_table_of_broken_rules_is_current():
    current = mutants.DOCS.read_text(encoding="utf-8")
    expected = mutants.with_table(current)
    assert current == expected, "not current: run python -m tests.sim.mutants --table"


def test_a_log_line_is_the_name_of_an_event_and_its_fields():
    fail_if_any(events.invalid_event_calls(), "expected `area.event field=value ...`")


def test_a_field_with_spaces_is_the_last_one():
    """The field has no quotes, so a parser could not find a field after it. A hint has quotes."""
    wrong = [
        event.name
        for event in events.events().values()
        if {"error", "reason", "message"}.intersection(
            [field for field in event.fields if field != "hint"][:-1]
        )
    ]
    fail_if_any(wrong, "error, reason and message come last")


def test_every_event_has_one_level():
    several = [
        f"{event.name}: {', '.join(map(logging.getLevelName, event.levels))}"
        for event in events.events().values()
        if len(event.levels) > 1
    ]
    fail_if_any(several, "one event, several levels")


def test_every_event_is_described_once():
    logged, described = events.events().keys(), events.descriptions().keys()
    fail_if_any(logged - described, f"no description in {events.TEXTS_FILE.name}")
    fail_if_any(described - logged, f"in {events.TEXTS_FILE.name}, but in no log line")


def test_every_warning_states_an_action():
    texts = events.descriptions()
    wrong = [
        f"{event.name}: {event.level}"
        for event in events.events().values()
        if event.name in texts and event.requires_action is not bool(texts[event.name].action)
    ]
    fail_if_any(wrong, "WARNING and ERROR have an action, other levels have none")
