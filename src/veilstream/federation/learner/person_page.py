"""Was this person used? A form for the person beside the learner, and the answer.

Who asks needs the access token itself, typed into the form or shown as a program does: the cookie
of the local page is not enough, since another program of this machine may see it. The tag is sent
in the body of a POST. It is in no address and no log, and the answer does not repeat it.
"""

from __future__ import annotations

from veilstream.deployment.ledger.inspect import PersonsPart
from veilstream.federation.learner.local_page import PAGE_HEADERS, PERSON_PATH, html_document, page_policy

# Under "no-referrer" a browser sends a form with the origin "null", which nobody may have here.
FORM_HEADERS = {**PAGE_HEADERS, "Content-Security-Policy": page_policy("'self'"), "Referrer-Policy": "same-origin"}

_FORM = f"""<form method="post" action="{PERSON_PATH}" autocomplete="off">
<label for="client">The person's tag, as it is given with a record</label>
<input id="client" name="client" required autocomplete="off" spellcheck="false">
<label for="token">The access token (the learner's token file)</label>
<input id="token" name="token" type="password" required autocomplete="off">
<button type="submit">Ask</button></form>
<p><a href="/page">Back to the learner's page</a></p>"""


def person_html(answer: PersonsPart | str | None) -> str:
    """The form; after an answer, or a reason why there is none."""
    if answer is None:
        said = ""
    elif isinstance(answer, str):
        said = f'<p class="notices" role="status">{answer}</p>'
    else:
        said = f'<p class="notices" role="status">{_sentence(answer)}</p>'
    return html_document("Was this person used?", said + _FORM)


def _sentence(part: PersonsPart) -> str:
    if not part.used:
        return "No: no record under this tag was used by this learner."
    if part.carried_over:
        return "Yes: this person took part before the store was lost, and is left out for ever; how often is not known."
    steps = "one step was" if part.times == 1 else f"{part.times} steps were"
    return (
        f"Yes: {steps} made of records under this tag, the last in epoch {part.last_epoch}. What "
        "left this machine is covered by the promise; the record itself was not kept."
    )
