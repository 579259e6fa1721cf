"""Names that somebody could give a role, a node or a lock, and words for durations: shared by the pages' tests."""

__all__ = ["DURATIONS", "NASTY"]

NASTY = (
    "<script>document.title='taken'</script>",
    "</title></bdi><img src=x onerror=document.title='taken'>",
    "\"quoted' onmouseover=\"document.title='taken'\" `",
    "&amp; &lt;b&gt; &#60;",
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u0645\u0631\u062d\u0628\u0627 \u202eabc",
    "=cmd|' /C calc'!A0",
    "w" * 200,
    "../..//?#%2F%00 \U0001f600 \\n",
)

DURATIONS: tuple[tuple[float | None, str], ...] = (
    (None, "\u2013"),
    (-5, "0 ms"),
    (0, "0 ms"),
    (999, "999 ms"),
    (1000, "1.0 s"),
    (9_900, "9.9 s"),
    (12_345, "12 s"),
    (60_000, "1 min"),
    (61_500, "1 min 1 s"),
    (3_600_000, "1 h"),
    (11_520_000, "3 h 12 min"),
    (86_400_000, "1 d"),
    (356_400_000, "4 d 3 h"),
)
