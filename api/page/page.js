// Keeps the page up to date. It works without: then a reload does the same.
(() => {
  "use strict";
  const every = 2000;
  const status = document.getElementById("status");
  let tag = "";

  const say = (text, stale) => {
    status.textContent = text;
    status.classList.toggle("stale", stale);
  };

  async function update() {
    const headers = tag ? { "If-None-Match": tag } : {};
    // Not relative: the page's own address may have a token in it, and fetch takes none.
    const answer = await fetch(location.origin + location.pathname + location.search, { headers, cache: "no-store" });
    if (answer.status === 304) return;
    if (!answer.ok) throw new Error("the server answers " + answer.status);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("live");
    if (!next) throw new Error("the answer is no page of quarry");
    tag = answer.headers.get("ETag") || "";
    const now = document.getElementById("live");
    if (now.innerHTML !== next.innerHTML) now.replaceWith(next);
  }

  async function turn() {
    const chosen = document.getSelection();
    if (!document.hidden && (!chosen || chosen.isCollapsed)) { // what somebody copies stays
      try {
        await update();
        say("live", false);
      } catch (e) {
        say("not up to date: " + e.message, true);
      }
    }
    setTimeout(turn, every);
  }
  turn();
})();
