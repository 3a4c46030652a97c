"""The pages of questions and of words: short, linked, and each thing under one stable name."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from markdown_it.renderer import RendererHTML
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser

ROOT = Path(__file__).resolve().parent.parent
TARGET = re.compile(r"(?P<words>.*?)\s*<(?P<target>[^<>]+)>", re.DOTALL)
BLOCKS = {"heading_open", "myst_target", "inline"}


def tokens(page):
    """The Markdown of a page, taken apart as the build takes it apart."""
    extensions = yaml.safe_load((ROOT / "_config.yml").read_text())["parse"]["myst_enable_extensions"]
    parser = create_md_parser(MdParserConfig(enable_extensions=set(extensions)), RendererHTML)
    return parser.parse((ROOT / page).read_text())


def linked(role):
    """The words that a role shows, and where it leads."""
    match = TARGET.fullmatch(role.content)
    return (match["words"], match["target"]) if match else ("", role.content)


def words(inline):
    """How many words a paragraph shows; a formula, a citation and a title that a link fetches count as one."""
    count = 0
    for token in inline.children:
        shown = linked(token)[0] or "one" if token.type == "myst_role" else token.content
        count += 1 if token.type == "math_inline" else len(re.findall(r"\w\S*", shown))
    return count


def in_bold(inline):
    """Whether a paragraph begins with a sentence in bold, and goes on behind it."""
    kinds = [token.type for token in inline.children if token.type != "text" or token.content]
    return kinds[0] == "strong_open" and kinds[-1] != "strong_close"


def questions():
    """Every question with its label, its answer's words and where its links lead, in the order of the page."""
    found, label, level = [], None, ""
    for token in tokens("questions.md"):
        if token.type not in BLOCKS:
            continue
        if token.type == "heading_open":
            level = token.tag
        elif token.type == "myst_target":
            label = token.content
        elif level == "h3":
            found.append({"label": label, "question": token.content, "words": 0, "links": []})
            label, level = None, "answer"
        elif level == "answer":
            roles = [child for child in token.children if child.type == "myst_role"]
            found[-1]["answers"] = found[-1].get("answers", in_bold(token))
            found[-1]["words"] += words(token)
            found[-1]["links"] += [linked(role)[1] for role in roles]
    return found


QUESTIONS = questions()
GLOSSARY = next(token.content for token in tokens("glossary.md") if token.info == "{glossary}")
ENTRIES = [entry.splitlines() for entry in GLOSSARY.strip().split("\n\n")]
TERMS = [line for entry in ENTRIES for line in entry if not line.startswith(" ")]


@pytest.mark.parametrize("asked", QUESTIONS, ids=[asked["label"] for asked in QUESTIONS])
def test_an_answer_is_short_and_leads_to_a_chapter(asked):
    assert asked["question"].endswith(("?", "?)"))
    assert re.fullmatch(r"q-[a-z-]+", asked["label"])
    assert asked["answers"]
    assert 60 <= asked["words"] <= 150, asked["words"]
    assert any(target.startswith("chapters/") for target in asked["links"]), asked["links"]


def test_no_label_or_question_twice():
    for key in ("label", "question"):
        assert max(Counter(asked[key] for asked in QUESTIONS).values()) == 1


def test_every_question_stands_under_a_heading_with_others():
    headings = [token.tag for token in tokens("questions.md") if token.type == "heading_open"]
    groups = " ".join(headings).split("h2")
    assert groups[0].split() == ["h1"]
    assert all(len(group.split()) >= 3 and set(group.split()) == {"h3"} for group in groups[1:])


def test_every_term_is_there_once_and_in_order():
    firsts = [entry[0].lower() for entry in ENTRIES]
    assert max(Counter(term.lower() for term in TERMS).values()) == 1
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry[0] for entry in ENTRIES])
def test_a_term_is_explained_briefly_and_has_a_page(entry):
    text = " ".join(line.strip() for line in entry if line.startswith(" "))
    assert 6 <= len(text.split()) <= 70
    assert re.search(r"\{doc\}`[\w/]+`$", text)


@pytest.mark.parametrize("page", ["questions.md", "glossary.md"])
def test_every_term_that_is_linked_is_in_the_glossary(page):
    roles = re.findall(r"\{term\}`([^`]+)`", (ROOT / page).read_text())
    used = {TARGET.fullmatch(role)["target"] if "<" in role else role for role in roles}
    assert used
    assert used <= set(TERMS)


def test_both_pages_are_listed_under_reference():
    parts = yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"]
    files = [chapter["file"] for part in parts if part["caption"] == "Reference" for chapter in part["chapters"]]
    assert files[0] == "questions"
    assert "glossary" in files
