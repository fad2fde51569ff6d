"""Where the rows of a SQLite database lie in its file (https://www.sqlite.org/fileformat.html)."""

import sqlite3
from contextlib import closing
from pathlib import Path


def content_bytes(database: Path) -> list[int]:
    """Offsets of all bytes of rows and of index entries, in a database that is made compact first."""
    compact = database.with_suffix(".compact")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("VACUUM INTO ?", (str(compact),))  # no free space between rows
        [[size]] = connection.execute("PRAGMA page_size")
    for suffix in ("-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    content = compact.replace(database).read_bytes()
    found: list[int] = []
    for page in range(size, len(content), size):  # without the first one, which begins the schema
        if (
            content[page] in (0x0A, 0x0D) and b"CREATE" not in content[page : page + size]
        ):  # leaves of indexes and tables
            first = int.from_bytes(content[page + 5 : page + 7]) or 65536
            found += range(page + first, page + size)
    return found
