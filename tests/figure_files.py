"""What figures on disk must be, and the texts that a figure shows."""

from __future__ import annotations

from xml.etree import ElementTree

from matplotlib.text import Text
from PIL import Image

SVG = "{http://www.w3.org/2000/svg}"


def check_files(files, must_say=()):
    """One PNG and one SVG that open, of a size that can be read, the SVG's words being text."""
    png, svg = files
    with Image.open(png) as image:
        image.load()
        assert image.format == "PNG"
        assert 500 <= image.width <= 3000
        assert 250 <= image.height <= 4000
        assert len(image.convert("L").getcolors()) > 5
    assert 5_000 < png.stat().st_size < 1_000_000
    assert svg.stat().st_size < 3_000_000
    said = " ".join(svg_words(svg))
    assert all(word in said for word in must_say), said


def svg_words(file):
    """Every text of an SVG file."""
    root = ElementTree.parse(file).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]


def texts(figure):
    """Every visible text of a figure."""
    return [each.get_text() for each in figure.findobj(Text) if each.get_visible() and each.get_text()]
