// Refreshes the page of a series: asks for the page again and puts its `#live` in place of ours when it changed.
"use strict";
(() => {
  const EVERY_MS = 5000;
  const said = document.getElementById("said");
  let tag = null;

  const say = (text) => {
    if (said.textContent !== text) said.textContent = text; // a screen reader hears only what is new
  };

  const replace = (html) => {
    const fresh = new DOMParser().parseFromString(html, "text/html").getElementById("live");
    const shown = document.getElementById("live");
    if (fresh === null || shown.innerHTML === fresh.innerHTML) return;
    const focused = shown.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const more = Number(fresh.dataset.rows) - Number(shown.dataset.rows);
    shown.replaceWith(document.adoptNode(fresh));
    for (const link of focused === null ? [] : fresh.querySelectorAll("a")) {
      if (link.getAttribute("href") === focused) link.focus();
    }
    if (more > 0) say(`${more} more checkpoint${more === 1 ? "" : "s"}. ${said.dataset.waiting}`);
  };

  const look = async () => {
    if (document.hidden) return;
    try {
      const headers = tag === null ? {} : { "If-None-Match": tag };
      const answer = await fetch(location.href, { headers, cache: "no-store" });
      if (answer.status === 304) return say(said.dataset.waiting);
      if (!answer.ok) return say(said.dataset.lost);
      tag = answer.headers.get("ETag");
      say(said.dataset.waiting);
      replace(await answer.text());
    } catch {
      say(said.dataset.lost);
    }
  };

  say(said.dataset.waiting);
  setInterval(look, EVERY_MS);
})();
