(() => {
  const tip = document.createElement('div');
  tip.id = 'tip'; tip.className = 'hidden'; tip.setAttribute('role', 'status'); document.body.append(tip);
  const hide = () => { tip.classList.add('hidden');
    document.querySelectorAll('.point.here').forEach(p => p.classList.remove('here')); };
  const show = point => {
    hide(); point.classList.add('here'); tip.textContent = point.dataset.tip; tip.classList.remove('hidden');
    const at = point.getBoundingClientRect(), box = tip.getBoundingClientRect();
    const left = Math.min(at.right + 8, innerWidth - box.width - 8);
    tip.style.left = Math.max(8, left) + 'px'; tip.style.top = Math.max(8, at.top - box.height - 4) + 'px';
  };
  for (const chart of document.querySelectorAll('.chart')) {
    const svg = chart.querySelector('.drawing svg');
    chart.addEventListener('pointerover', e => { const p = e.target.closest('.point'); p ? show(p) : hide(); });
    chart.addEventListener('pointerleave', hide);
    svg.addEventListener('blur', hide);
    svg.addEventListener('keydown', e => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[e.key];
      if (e.key === 'Escape') hide();
      if (!step) return;
      e.preventDefault();
      const points = [...svg.querySelectorAll('g:not(.hidden) > .point')];
      const now = points.findIndex(p => p.classList.contains('here'));
      if (points.length) show(points[now < 0 ? (step > 0 ? 0 : points.length - 1)
        : (now + step + points.length) % points.length]);
    });
    for (const button of chart.querySelectorAll('.legend button')) button.addEventListener('click', () => {
      const on = button.getAttribute('aria-pressed') !== 'true';
      button.setAttribute('aria-pressed', on);
      svg.querySelectorAll(`g[data-series="${button.dataset.series}"]`)
        .forEach(g => g.classList.toggle('hidden', !on));
    });
  }
})();
