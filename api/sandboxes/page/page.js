// Fetches the page again while somebody looks at it, and puts the new tables in.
"use strict";
const every = 2000;
async function refresh() {
  if (document.hidden) return;
  // Not relative: the page's own address may have a token in it, and fetch takes none.
  const answer = await fetch(location.origin + "/", { headers: { Accept: "text/html" }, cache: "no-store" });
  if (!answer.ok) return;
  const next = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of ["header", "main"]) {
    const fresh = next.querySelector(part);
    if (fresh) document.querySelector(part).replaceWith(fresh);
  }
}
setInterval(() => refresh().catch(() => {}), every);
