"""What `mmvllm info` prints."""


def sections_of(out: str) -> dict[str, dict[str, str]]:
    """The values by title and name."""
    sections, title = {}, ""
    for line in out.splitlines():
        if line.startswith("  "):
            sections[title][line[2:18].strip()] = line[18:].strip()
        else:
            title = line
            sections[title] = {}
    return sections
