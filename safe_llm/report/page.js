"use strict";
// Everything a model wrote reaches the page as text: textContent only, no markup is ever built from strings.

const hasRoom = matchMedia("(min-width: 62rem)");

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function percent(p) {
  if (p === null || p === undefined) return "–";
  const value = 100 * p;
  return (value >= 10 || value === 0 ? value.toFixed(0) : value >= 0.1 ? value.toFixed(1) : "< 0.1") + " %";
}

function meter(p) {
  const bar = make("i");
  bar.style.width = Math.max(0, Math.min(100, 100 * p)) + "%";
  const track = make("div", "meter", bar);
  track.setAttribute("aria-hidden", "true");
  return track;
}

// The members as the paper calls them: D drafts, V1, V2, ... verify.
function tag(i) {
  return make("span", "tag", i ? "V" + i : "D");
}

function section(title, rows) {
  return rows.length ? [make("h4", "", title), make("div", "", ...rows)] : [];
}

function heading(token) {
  const title = make("h3", "", make("code", "", token.token));
  if (token.acted && token.drafted !== token.token) {
    title.append(make("span", "change", " instead of "), make("code", "", token.drafted));
  }
  const verdict = make("p", "verdict", make("span", "tok " + token.look, token.meaning));
  return [title, verdict, make("p", "", token.why), make("p", "quiet", "token " + token.position + ", byte " + token.byte)];
}

function favourites(tops) {
  return make("div", "more", ...tops.map(([text, p]) => make("span", "", make("code", "", text), " " + percent(p))));
}

function memberRows(members, token) {
  return members.map((member, i) => {
    const p = token.asked[i];
    const known = p !== null && p !== undefined;
    const name = make("span", "", tag(i), " " + member.name);
    const row = make("div", "row", name, make("span", "numbers", known ? percent(p) : "not asked"));
    if (known) row.append(meter(p));
    if (token.tops[i].length) row.append(favourites(token.tops[i]));
    return row;
  });
}

function candidateRows(members, token) {
  return token.candidates.map(([text, score, given]) => {
    const shares = members.map((_, i) => make("span", "", tag(i), " " + percent(given[i])));
    const line = make("div", "more", make("code", "", text), ...shares);
    return make("div", text === token.token ? "row won" : "row", line, make("span", "numbers", percent(score)), meter(score));
  });
}

function cutRows(members, token) {
  return token.cuts.map(([name, begins, pieces]) => {
    const boxes = pieces.map(([text, here, exact]) =>
      make("span", "piece" + (here ? " here" : "") + (exact ? "" : " vague"), text));
    const where = make("span", "numbers", begins ? "a token begins here" : "inside a token");
    const who = members.findIndex((member) => member.name === name);
    return make("div", "row", make("span", "", ...(who < 0 ? [] : [tag(who), " "]), name), where, make("div", "pieces", ...boxes));
  });
}

function setUp(article) {
  const data = JSON.parse(article.querySelector('script[type="application/json"]').textContent);
  const text = article.querySelector(".text");
  const panel = article.querySelector(".panel");
  const spans = [...text.querySelectorAll(".tok")];
  const points = data.tokens.flatMap((token, i) => (token.acted ? [i] : []));
  let current = -1;
  let shown = -1;

  function show(index) {
    if (index === shown || !data.tokens[index]) return;
    shown = index;
    const token = data.tokens[index];
    panel.replaceChildren(
      ...heading(token),
      ...section("Own token here, and favourites", memberRows(data.members, token)),
      ...section("Ensembled candidates", candidateRows(data.members, token)),
      ...section("How each member cuts the text here", cutRows(data.members, token)),
      ...(points.length ? [steps()] : []),
    );
    panel.scrollTop = 0;
  }

  function steps() {
    const back = make("button", "", "‹ previous point");
    const on = make("button", "", "next point ›");
    back.type = on.type = "button";
    back.addEventListener("click", () => go(nextPoint(-1), true));
    on.addEventListener("click", () => go(nextPoint(1), true));
    return make("div", "steps", back, on);
  }

  function mark(index) {
    for (const span of spans) {
      span.tabIndex = -1;
      span.removeAttribute("aria-current");
    }
    spans[index].tabIndex = 0;
    spans[index].setAttribute("aria-current", "true");
    current = index;
  }

  function go(index, focus) {
    if (!spans[index]) return;
    mark(index);
    show(index);
    if (focus) spans[index].focus();
    if (!hasRoom.matches) reveal(spans[index]);
  }

  // Where the panel lies over the text, bring the token above it.
  function reveal(span) {
    const [token, sheet] = [span.getBoundingClientRect(), panel.getBoundingClientRect()];
    if (token.top < 0 || token.bottom > sheet.top || sheet.bottom > innerHeight) {
      scrollBy(0, token.top - innerHeight / 4);
    }
  }

  function nextPoint(step) {
    const found = step > 0 ? points.find((i) => i > current) : points.findLast((i) => i < current);
    return found === undefined ? points.at(step > 0 ? 0 : -1) : found;
  }

  // The token of the next or previous line that is nearest in the horizontal.
  function vertical(step) {
    const from = spans[current].getBoundingClientRect();
    const middle = (from.left + from.right) / 2;
    let best = current;
    let bestLine = null;
    let bestGap = Infinity;
    for (let i = current + step; spans[i]; i += step) {
      const box = spans[i].getClientRects()[0];
      const isBeyond = step > 0 ? box.top > from.top + 4 : box.top < from.top - 4;
      if (!isBeyond) continue;
      if (bestLine !== null && Math.abs(box.top - bestLine) > 4) break;
      const gap = Math.abs((box.left + box.right) / 2 - middle);
      bestLine = bestLine === null ? box.top : bestLine;
      if (gap < bestGap) [best, bestGap] = [i, gap];
    }
    return best;
  }

  const keys = {
    ArrowRight: () => current + 1,
    ArrowLeft: () => current - 1,
    ArrowDown: () => vertical(1),
    ArrowUp: () => vertical(-1),
    Home: () => 0,
    End: () => spans.length - 1,
    n: () => nextPoint(1),
    p: () => nextPoint(-1),
  };

  text.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    go(keys[event.key](), true);
  });
  text.addEventListener("focusin", (event) => go(spans.indexOf(event.target.closest(".tok")), false));
  // Where the panel comes up over the text it would come between the pointer and the token: there a click opens it.
  text.addEventListener("mouseover", (event) => {
    const span = event.target.closest(".tok");
    if (span && hasRoom.matches) show(spans.indexOf(span));
  });
  text.addEventListener("mouseleave", () => hasRoom.matches && show(current));
  const first = points.length ? points[0] : 0;
  if (!spans.length) return;
  mark(first);
  if (hasRoom.matches) show(first); // else the panel would cover the text before anybody has read it
}

document.querySelectorAll("article").forEach(setUp);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((item) => (item.open = true)));
