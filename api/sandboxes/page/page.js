// Fetches the page again while somebody looks at it, and puts the new tables in.
"use strict";
const every = 2000;
async function refresh() {
  if (document.hidden) return;
  const answer = await fetch("/", { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const next = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of ["header", "main"]) {
    const fresh = next.querySelector(part);
    if (fresh) document.querySelector(part).replaceWith(fresh);
  }
}
setInterval(() => refresh().catch(() => {}), every);
