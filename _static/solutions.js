// A link to something inside a folded solution unfolds it.
const unfold = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target?.closest(".toggle-hidden");
  if (!folded) return;
  folded.querySelector("button.toggle-button").click();
  target.scrollIntoView();
};
window.addEventListener("load", unfold);
window.addEventListener("hashchange", unfold);
