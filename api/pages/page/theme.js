// The colours: the system's, or the ones chosen here. Loaded before the page is drawn, so that it is not drawn twice.
{
  const root = document.documentElement.dataset;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const stored = localStorage.getItem("theme");
  if (stored) root.theme = stored;
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.title = `Use ${isDark() ? "light" : "dark"} colours`;
    };
    button.onclick = () => {
      root.theme = isDark() ? "light" : "dark";
      localStorage.setItem("theme", root.theme);
      label();
    };
    system.addEventListener("change", label);
    label();
  });
}
